"""`truestep serve`: serves the policy as an endpoint, without training. Documents with rewards are written as
records."""

import asyncio
import hmac
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from truestep.config.schema import Config
from truestep.config.sections import InProcessSampler
from truestep.errors import TruestepError
from truestep.generate.endpoint.document import Document
from truestep.generate.endpoint.errors import RequestError
from truestep.generate.endpoint.keys import Served
from truestep.generate.endpoint.server import Endpoint
from truestep.generate.engine.phase import EngineSettings
from truestep.generate.engine.service import EngineGenerator
from truestep.generate.generator import DrawOptions, Generate
from truestep.generate.hosts import is_loopback, leads_to_loopback
from truestep.generate.play import EpisodeLimits, played_sequences
from truestep.generate.read import stop_ids
from truestep.model.policy import Policy
from truestep.run.assemble.policy import join_ranks, make_policy
from truestep.run.assemble.servers import secret_of

_MOST_OPEN = 4096  # most open documents; if there are more, the least recently used one is dropped
_MOST_TURNS = 256  # most turns of a document
_LONGEST_NAME = 200


class ServeError(TruestepError):
    pass


class Beside(Protocol):
    """Another protocol, served at the same address by the same process."""

    keys: Path | None

    def begin(self, config: Config, policy: Policy, longest: int) -> list[Any]:
        """Return routes to add to the server's."""
        ...

    async def run(self) -> None:
        """Run until cancelled."""
        ...


def serve(
    config: Config,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    key_env: str | None = None,
    documents: str | Path | None = None,
    weights: str | Path | None = None,
    beside: Beside | None = None,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve the policy until the process is interrupted. `ready` is called with the base URL. `beside`: another
    protocol at the same address.

    `key_env`: the environment variable with a secret. A key is then the secret, or the secret, a colon and the
    document's name. Without a secret, which is allowed only on loopback, any key is a document's name. `documents`: the
    file to which documents are appended when their rewards are posted. `weights`: a checkpoint to serve in place of
    model.path.
    """
    secret = secret_of("--key-env", key_env)
    file = None if documents is None else Path(documents)
    if file is not None and file.is_dir():
        raise ServeError(f"--documents: {file} is a directory")
    if secret is None and not is_loopback(host):
        raise ServeError(f"--host {host} may be reached by others: give --key-env, the variable that holds a secret")
    if beside is not None and beside.keys is None and not is_loopback(host):
        raise ServeError(f"--host {host} may be reached by others: give --tinker-keys, the file with tenants' keys")
    ranks = join_ranks(config)
    policy = make_policy(config, ranks, None if weights is None else str(weights), frozen=weights is None)
    sampler = config.sampler if isinstance(config.sampler, InProcessSampler) else None
    longest = config.data.tokens_per_microbatch if sampler is None else sampler.max_episode_tokens
    draw = DrawOptions(
        temperature=1.0 if sampler is None else sampler.temperature,
        max_new_tokens=longest if sampler is None else sampler.max_new_tokens,
        stop_ids=stop_ids(policy),
        stop=() if sampler is None else tuple(sampler.stop or ()),
    )
    settings = EngineSettings(None if sampler is None else sampler.batch_size, longest)
    generator = EngineGenerator(policy, replace(settings, at_once=settings.most_rows(policy)))

    async def work(item: None, generate: Generate) -> None:
        keys = _Documents(policy, generate, draw, EpisodeLimits(_MOST_TURNS, longest), secret, file)
        routes = () if beside is None else beside.begin(config, policy, longest)
        # Without a secret, a web page could send requests to this machine by a host name that resolves to it (DNS
        # rebinding).
        accepts = leads_to_loopback if secret is None else lambda host: True
        endpoint = Endpoint(keys, Path(config.model.path).name, host, port, accepts, routes)
        ready(endpoint.url)
        try:
            await (asyncio.Event().wait() if beside is None else beside.run())
        finally:
            endpoint.close()

    generator.map([None], work)


class _Documents:
    """The open documents, by name."""

    def __init__(
        self,
        policy: Policy,
        generate: Generate,
        draw: DrawOptions,
        limits: EpisodeLimits,
        secret: str | None,
        file: Path | None,
    ):
        self._policy, self._generate, self._draw, self._limits = policy, generate, draw, limits
        self._secret, self._file = secret, file
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Served] = OrderedDict()

    def find(self, key: str) -> Served | None:
        name = self._name_of(key)
        if name is None:
            return None
        with self._lock:
            served = self._open.get(name)
            if served is None or (self._file is None and len(served.document.completions) >= _MOST_TURNS):
                served = self._open[name] = self._begun(name)
            self._open.move_to_end(name)
            while len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
        return served

    def _name_of(self, key: str) -> str | None:
        """Return the document's name in a key; None if the key is wrong."""
        if self._secret is not None:
            length = len(self._secret)
            if (
                not hmac.compare_digest(key[:length].encode(), self._secret.encode())
                or key[length : length + 1] not in ":"
            ):
                return None
            key = key[length + 1 :]
        return key if key.isprintable() and len(key) <= _LONGEST_NAME else None

    def _begun(self, name: str) -> Served:
        document = Document(
            self._policy.tokenizer, self._generate, self._draw, self._limits, _ignore, name=name, obeys=True
        )
        return Served(document, lambda: self._posted(name, document), self._loop)

    def _posted(self, name: str, document: Document) -> None:
        """Write a document to the file, and close it, so that its name can be used for a new one."""
        if self._file is None:
            raise RequestError("documents are not kept: start `truestep serve` with --documents FILE")
        if not document.completions:
            raise RequestError("the document has no completion")
        if len(document.temperatures) > 1 or 0.0 in document.temperatures:
            shown = ", ".join(f"{value:g}" for value in sorted(document.temperatures))
            raise RequestError(f"the completions were drawn at temperatures {shown}: a document has one, above 0")
        records = records_of(document, name)
        with self._file.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records))
        with self._lock:
            if self._open.get(name) is not None and self._open[name].document is document:
                del self._open[name]
        document.close()


def _ignore(error: Exception) -> None:
    """Do nothing: the request is refused, and nothing else can be done."""


def records_of(document: Document, name: str) -> list[dict[str, Any]]:
    """Return a document with a reward as records of its sequences (docs/contract.md)."""
    assert document.rating is not None
    played = [one for one in played_sequences(document.sequences, document.turn_rewards) if any(one.loss_mask)]
    (temperature,) = document.temperatures
    return [
        {
            "id": f"{name}.{number}" if len(played) > 1 else name,
            "input_ids": list(one.input_ids),
            "loss_mask": [int(own) for own in one.loss_mask],
            "logprobs": list(one.logprobs),
            "reward": float(document.rating),
            "rewards": dict(document.rating.parts),
            "temperature": temperature,
            "truncated": document.cut_by is not None,
            **({} if document.group_id is None else {"group_id": document.group_id}),
            "turns": [
                {"start": turn.start, "end": turn.end, "role": turn.role}
                | ({} if turn.reward is None else {"reward": turn.reward})
                for turn in one.turns
            ],
            **({"document_id": name, "sequences": len(played)} if len(played) > 1 else {}),
        }
        for number, one in enumerate(played)
    ]
