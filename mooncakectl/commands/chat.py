"""`mooncakectl chat`: ask the cluster from the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from mooncakectl.ask import SCHEMA, Answer, ask, first_model
from mooncakectl.output import Format, Table, View, columns, print_view, show_count, show_ms, show_share
from mooncakectl.params import ConfigOption, EtcdOption, OutputOption, run_async
from mooncakectl.records import read_records
from mooncakectl.target import open_etcd, resolve_target
from mooncakectl.web import open_web
from mooncaked.errors import InvalidRequest, MooncakeError, NoLeader, NotFound, Unreachable

app = typer.Typer()

Message = dict[str, str]
_FILE_BYTES_MAX = 8 << 20


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How to ask."""

    gateways: list[str]
    model: str
    system: str | None
    max_tokens: int
    temperature: float
    seed: int | None
    timeout_s: float


@app.command("chat")
def chat_command(
    question: Annotated[str | None, typer.Argument(help="Without it, on a terminal: a conversation.")] = None,
    file: Annotated[
        str | None,
        typer.Option("--file", "-f", metavar="TEXT", help="Text to ask about; - is standard input."),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer.")] = 256,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, help="0: always the same answer.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option("--seed", help="For temperatures above 0.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Default: the first that is served.")] = None,
    gateway: Annotated[
        str | None,
        typer.Option(
            "--gateway", envvar="MOONCAKE_GATEWAY", metavar="URL", help="Default: from etcd, leader first."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds for one answer.")] = 600.0,
    etcd: EtcdOption = None,
    config: ConfigOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Ask a question, and show what the answer took.

    The answer goes to standard output; time to first token, reused tokens and instances go after it (to
    standard error when the output is piped). With -o json or yaml it is all one document."""
    if question is None and not (file is None and output is Format.TABLE and sys.stdin.isatty()):
        raise InvalidRequest(problem="chat needs a question, or a terminal and no --file for a conversation.")
    text = read_text(file) if file else ""
    gateways = [gateway.rstrip("/")] if gateway else run_async(find_gateways(etcd, config))
    settings = Settings(
        gateways=gateways,
        model=model or run_async(find_model(gateways)),
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        timeout_s=timeout,
    )
    if question is None:
        converse(settings)
        return
    messages = [{"role": "user", "content": f"{text}\n\n{question}" if text else question}]
    if output is Format.TABLE:
        say(settings, messages)
    else:
        print_view(answer_view(run_async(answer_to(settings, messages, quiet=True))), output)


def read_text(name: str) -> str:
    """The text of `--file`, without the white space at its ends; raises `NotFound` or `InvalidRequest`."""
    try:
        data = sys.stdin.buffer.read(_FILE_BYTES_MAX + 1) if name == "-" else Path(name).read_bytes()
        if len(data) > _FILE_BYTES_MAX:
            raise InvalidRequest(problem=f"--file {name} is larger than {_FILE_BYTES_MAX >> 20} MiB.")
        return data.decode().strip()
    except FileNotFoundError as error:
        raise NotFound(kind="File", name=name, remedy="Check the path.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(problem=f"--file {name} is no readable UTF-8 text: {error}") from error


async def find_gateways(etcd: str | None, config: Path | None) -> list[str]:
    """Base URLs of the gateways, the leader's first; raises `NoLeader` when there is none.

    Gateways serve while etcd is away, and those of the local cluster are known without it."""
    target = resolve_target(etcd, config)
    try:
        async with open_etcd(target) as session:
            records = await read_records(session, target.etcd.prefix)
    except Unreachable:
        if not target.gateways:
            raise
        return target.gateways
    if not records.candidates:
        raise NoLeader(detail="no conductor candidate is registered in etcd")
    return records.gateways()


async def find_model(gateways: list[str]) -> str:
    """The first model that is served."""
    async with open_web() as web:
        return await first_model(web, gateways)


async def answer_to(settings: Settings, messages: list[Message], quiet: bool = False) -> Answer:
    """Ask; unless `quiet`, print the text as it comes."""
    head = [{"role": "system", "content": settings.system}] if settings.system else []
    body: dict[str, Any] = {
        "model": settings.model,
        "messages": [*head, *messages],
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
    }
    if settings.seed is not None:
        body["seed"] = settings.seed
    async with open_web(settings.timeout_s) as web:
        return await ask(web, settings.gateways, body, _ignore if quiet else _print_piece)


def _ignore(_piece: str) -> None:
    return


def _print_piece(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def say(settings: Settings, messages: list[Message]) -> Answer:
    """Ask, print the answer as it comes, and what it took below."""
    answer = run_async(answer_to(settings, messages))
    print(flush=True)
    out = sys.stdout if sys.stdout.isatty() else sys.stderr
    print(f"\n{footer(answer)}", file=out)
    return answer


def footer(answer: Answer) -> str:
    """What an answer took, on one line."""
    tokens = answer.answer_tokens
    spent_ms = (answer.total_ms or 0) - (answer.ttft_ms or 0)
    rate = f", {(tokens - 1) * 1000 / spent_ms:.1f}/s" if tokens and tokens > 1 and spent_ms > 0 else ""
    parts = [
        f"TTFT {show_ms(answer.ttft_ms)}",
        f"prompt {show_count(answer.prompt_tokens)} tokens, {show_count(answer.reused_tokens)} reused "
        f"({show_share(answer.reused_tokens, answer.prompt_tokens)})",
        f"answer {show_count(tokens)} tokens{rate}",
        f"prefill {answer.prefill or '-'}, decode {answer.decode or '-'}",
    ]
    if answer.finish_reason == "length":
        parts.append("cut off at --max-tokens")
    return f"[{' | '.join(parts)}]"


def converse(settings: Settings) -> None:
    """Questions from the terminal, each with the conversation so far, until the end of input."""
    print(f"Talking to {settings.model}. End with Ctrl-D.", file=sys.stderr)
    messages: list[Message] = []
    while True:
        try:
            question = input("\n> ").strip()
        except EOFError:
            print()
            return
        if not question:
            continue
        messages.append({"role": "user", "content": question})
        try:
            answer = say(settings, messages)
        except MooncakeError as error:
            print(f"error: {error}", file=sys.stderr)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer.answer})


def answer_view(answer: Answer) -> View:
    """An answer for programs."""
    data = msgspec.to_builtins(answer)
    table = Table(columns=columns("what", "value"), rows=[(k, str(v)) for k, v in data.items()])
    return View(schema=SCHEMA, data=data, tables=[table])
