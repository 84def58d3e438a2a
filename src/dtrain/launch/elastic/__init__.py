"""Run ranks under torch.distributed.elastic, for nodes that join and leave during a run."""
