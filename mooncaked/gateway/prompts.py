"""From a request to the prompt's tokens and block keys; both are kept for the next turn or the next retry."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from mooncaked.conductor.fleet import Site
from mooncaked.conductor.messages import Family
from mooncaked.errors import EngineFailed, NoInstance
from mooncaked.gateway.engines import Engines, Target
from mooncaked.gateway.openai import Request, invalid
from mooncaked.keys import HASH_NAME, chain_keys

CACHE_BYTES_MAX = 64 << 20
TRIES_MAX = 3  # instances asked to tokenize one prompt

_encode = msgspec.json.Encoder().encode
_ids = msgspec.json.Decoder(list[int]).decode


class Prompt:
    """One tokenized prompt. The ids are kept as JSON: small, and what engine requests want."""

    __slots__ = ("_chains", "count", "json")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.json = msgspec.Raw(_encode(list(tokens)))
        self.count = len(tokens)
        self._chains: dict[Family, list[bytes]] = {}

    def chains(self, families: set[Family]) -> dict[Family, list[bytes]]:
        """The keys of the full blocks, for each family whose way of making keys is known here."""
        missing = [f for f in families if f not in self._chains and f.hash_name == HASH_NAME]
        if missing:
            tokens = _ids(self.json)
            for family in missing:
                self._chains[family] = chain_keys(family.namespace, tokens, family.block_tokens)
        return {family: self._chains[family] for family in families if family in self._chains}

    def size(self) -> int:
        """About how many bytes this takes."""
        return len(bytes(self.json)) + 64 * sum(map(len, self._chains.values())) + 500


class Prompts:
    """Tokenizes by asking engines, and remembers the last prompts (least recently used out first)."""

    def __init__(
        self, engines: Engines, failed: Callable[[str], None], cache_bytes_max: int = CACHE_BYTES_MAX
    ) -> None:
        self._engines = engines
        self._failed = failed  # called with an instance that failed
        self._cache: OrderedDict[bytes, tuple[Prompt, int]] = OrderedDict()
        self._cache_bytes = 0
        self._cache_bytes_max = cache_bytes_max
        self._turn = 0

    async def prompt(self, request: Request, sites: Sequence[Site], families: set[Family]) -> Prompt:
        """The request's prompt, its chains for `families` computed. `sites` serve the model, best first.

        Raises `InvalidRequest`, `EngineFailed` or `NoInstance`."""
        if isinstance(request.prompt, list):
            prompt = Prompt(request.prompt)
        else:
            key = _cache_key(request)
            known = self._cache.get(key)
            if known is not None:
                self._cache.move_to_end(key)
                return known[0]
            prompt = Prompt(await self._tokenize(request, sites))
            prompt.chains(families)
            self._keep(key, prompt)
        if prompt.count == 0:
            raise invalid("the prompt is empty", "messages" if request.chat else "prompt")
        return prompt

    async def _tokenize(self, request: Request, sites: Sequence[Site]) -> list[int]:
        what = "messages" if request.chat else "prompt"
        body: dict[str, object] = {"model": request.model, what: getattr(request, what)}
        self._turn += 1  # spread the work over the instances
        best = [site for site in sites if site.fit] or list(sites)
        start = self._turn % max(1, len(best))
        others = [site for site in sites if site not in best]
        problem: EngineFailed | None = None
        for site in [*best[start:], *best[:start], *others][:TRIES_MAX]:
            target = Target(site.instance_id, site.record.url)
            try:
                return (await self._engines.tokenize(target, body)).tokens
            except EngineFailed as error:
                problem = error
                self._failed(site.instance_id)
        raise problem or NoInstance(model=request.model, detail="none is registered")

    def _keep(self, key: bytes, prompt: Prompt) -> None:
        size = prompt.size()
        if size > self._cache_bytes_max // 4 or prompt.count == 0:
            return
        if key in self._cache:
            self._cache_bytes -= self._cache.pop(key)[1]
        self._cache[key] = (prompt, size)
        self._cache_bytes += size
        while self._cache_bytes > self._cache_bytes_max:
            _, (_, dropped) = self._cache.popitem(last=False)
            self._cache_bytes -= dropped


def _cache_key(request: Request) -> bytes:
    """A cryptographic hash: nobody must be able to make a prompt that passes for another's."""
    content = _encode([request.model, request.messages, request.prompt])
    return hashlib.blake2b(content, digest_size=32).digest()
