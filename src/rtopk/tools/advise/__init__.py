"""Does compression pay on this link? Predicted from measured parts, and said plainly where dense wins."""

from rtopk.tools.advise.advice import Advice, choose
from rtopk.tools.advise.cost import Link, Prediction, Workload, predict
from rtopk.tools.advise.machine import Machine, measure, reference

__all__ = ["Advice", "Link", "Machine", "Prediction", "Workload", "choose", "measure", "predict", "reference"]
