"""A configuration as the command line that repeats it: only what differs from the defaults is written."""

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any

from rtopk.studies.train.config import Config


def command(config: Mapping[str, Any], program: str = "rtopk train") -> str:
    """Return the command that runs the configuration again.

    >>> command({**Config().to_dict(), "density": 0.001, "dense_biases": True, "masking": False})
    'rtopk train --density 0.001 --dense-biases --no-masking'
    """
    words = program.split()
    for field in dataclasses.fields(Config):
        value = config.get(field.name, field.default)
        if value == field.default:
            continue
        option = field.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", shlex.quote(str(value))]
    return " ".join(words)
