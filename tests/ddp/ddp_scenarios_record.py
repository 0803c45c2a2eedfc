"""Recording a job's gradients; run inside worker processes."""

from typing import Any

import torch
from ddp_parts import bits, loss_of, net, sgd, train, wrap
from ddp_worker import Place

import rtopk


def record(at: Place) -> dict[str, Any]:
    """Plain DDP and one that records end alike; the folder is read by the test."""
    plain, recorded = net(), net()
    ddp = wrap(recorded)
    rtopk.ddp.record(ddp, at.folder / "recorded", steps=4)
    for model in (wrap(plain), ddp):
        train(model, sgd(model.module, lr=0.1), range(6), at.rank)
    own, found = net(), []  # this rank's gradients, as the weights of plain DDP move
    for step in range(4):
        loss = loss_of(own, at.rank, step)
        weights = [p for p in own.parameters() if p.dim() > 1]
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)]))
        again = net()
        train(wrap(again), sgd(again, lr=0.1), range(step + 1), at.rank)
        own.load_state_dict(again.state_dict())
    return {
        "ends": [bits(plain), bits(recorded)],
        "own": [bits({"gradient": g}) for g in found],
        **_refusals(at),
    }


def _refusals(at: Place) -> dict[str, Any]:
    said = {}
    for name, model, more in (
        ("used", net(), {"folder": at.folder / "recorded"}),
        ("steps", net(), {"folder": at.folder / "none", "steps": 0}),
        ("flat", torch.nn.LayerNorm(4), {"folder": at.folder / "none"}),
    ):
        try:
            rtopk.ddp.record(wrap(model), **more)
        except ValueError as error:
            said[name] = str(error)
    ddp = wrap(net())
    rtopk.ddp.register(ddp, 0.1)
    try:
        rtopk.ddp.record(ddp, at.folder / "none")
    except ValueError as error:
        said["registered"] = str(error)
    return {"said": said, "made": (at.folder / "none").exists()}
