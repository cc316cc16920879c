"""Fixtures of the engine's tests: tiny models, a store in memory, engines that are closed in the end."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncaked.engines.reference.kv_store import BlockClient
from mooncaked.engines.reference.model_files import LoadedModel
from tests.engines.harness import Running, load
from tests.engines.memory_store import MemoryStore
from tests.engines.serving import Http, serving
from tests.engines.tiny_model import write_gguf, write_hf

Start = Callable[..., Running]


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as a Hugging Face directory."""
    return write_hf(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a GGUF file."""
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny(tiny_dir: Path) -> LoadedModel:
    """The same model in memory."""
    return load(tiny_dir)


@pytest.fixture
def store() -> MemoryStore:
    """An empty store."""
    return MemoryStore()


@pytest.fixture
def start(tiny: LoadedModel) -> Iterator[Start]:
    """Starts engines on the tiny model; what they hold at the end of the test is checked."""
    running: list[Running] = []

    def begin(client: BlockClient | None = None, model: LoadedModel | None = None, **changes: Any) -> Running:
        running.append(Running(model or tiny, client, **changes))
        return running[-1]

    yield begin
    for one in running:
        if one.engine.alive:
            one.check_idle()
        one.close()


@pytest.fixture
async def http(start: Start, store: MemoryStore) -> AsyncIterator[Http]:
    """A client of the tiny model's HTTP interface; the engine has an empty store."""
    async with serving(start(store)) as client:
        yield client


@pytest.fixture(scope="session")
def real_model_path() -> Path:
    """The model of MOONCAKE_MODEL, else the default one, which `make test` puts into the cache."""
    cache = Path(os.environ.get("MOONCAKE_CACHE", "~/.cache/mooncake")).expanduser()
    path = Path(os.environ.get("MOONCAKE_MODEL", cache / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    if not path.exists():
        pytest.skip(f"{path} is not there; `make test` fetches it")
    return path


@pytest.fixture(scope="session")
def real(real_model_path: Path) -> LoadedModel:
    """The same in memory; some 600 MB for the default one."""
    return load(real_model_path)
