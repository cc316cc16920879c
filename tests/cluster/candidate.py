"""A candidate in a process of its own: prints a line when it begins or ceases to lead.

python -m tests.cluster.candidate ENDPOINT PREFIX ID TTL_S
"""

from __future__ import annotations

import sys

import uvloop

from mooncaked.cluster.election import Election, Standing
from mooncaked.cluster.etcd import EtcdOptions, EtcdSession
from tests.cluster.records import candidate


async def main(endpoint: str, prefix: str, candidate_id: str, ttl_s: str) -> None:
    async with EtcdSession(EtcdOptions(endpoints=[endpoint])) as etcd:
        election = Election(etcd, prefix, candidate(candidate_id), float(ttl_s))
        last: int | None = None

        def tell(standing: Standing) -> None:
            nonlocal last
            if standing.term != last:
                last = standing.term
                print(f"leads {last}" if last else "follows", flush=True)

        election.on_change(tell)
        await election.run()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
