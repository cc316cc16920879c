"""Records to register in tests."""

from __future__ import annotations

from mooncaked.types import CandidateRecord, InstanceRecord, NodePhase, NodeRecord, Role


def node(node_id: str, phase: NodePhase = NodePhase.READY, epoch: int = 1) -> NodeRecord:
    return NodeRecord(
        node_id=node_id,
        phase=phase,
        host="localhost",
        pid=1,
        version="0",
        peer_address="127.0.0.1:7801",
        http_address="127.0.0.1:7802",
        client_socket="/run/client.sock",
        capacity_bytes={"dram": 1 << 30},
        started_at_s=0.0,
        epoch=epoch,
    )


def instance(instance_id: str, role: Role = Role.BOTH) -> InstanceRecord:
    return InstanceRecord(
        instance_id=instance_id,
        url="http://127.0.0.1:8000",
        role=role,
        model="m",
        engine="reference",
        node_id="n1",
        namespace="m",
        hash_name="mooncake_xxh3",
        block_tokens=32,
        kv_bytes_per_token=1,
        context_tokens=2048,
        kv_capacity_tokens=4096,
        batch_max=8,
        pid=1,
        started_at_s=0.0,
    )


def candidate(candidate_id: str) -> CandidateRecord:
    return CandidateRecord(
        candidate_id=candidate_id,
        gateway_url=f"http://{candidate_id}:7803",
        host="localhost",
        pid=1,
        version="0",
        started_at_s=0.0,
    )
