"""The cluster on one machine that `make run` and `mooncakectl up` bring up, and the set-up that it needs."""
