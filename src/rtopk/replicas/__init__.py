"""What the engines that exchange gradients between replicas share: options, rounds, state, checkpoints.

`rtopk.ddp` and `rtopk.fsdp` differ only in where gradients come from and where their mean goes.
"""
