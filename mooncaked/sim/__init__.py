"""Experiments without a cluster: the daemon's own decisions, driven by recorded or generated requests."""
