"""Measurements of a node's parts, each a program of its own that `mooncakectl bench` starts."""
