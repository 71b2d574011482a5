"""`ds4mlx wire`: what a coding agent needs to use the running server. Prints it, and changes no file."""
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from ds4mlx.errors import UsageError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ds4mlx.cli.wire_setup import Client, Endpoint
    from ds4mlx.config import Settings

NAMES = ("claude", "codex", "opencode", "pi")
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def add_parser(subparsers: "_SubParsersAction[ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "wire", allow_abbrev=False, help="print the configuration of a coding agent for the running server",
        usage="ds4mlx wire CLIENT [OPTIONS]",
        description="Prints the wrapper script (claude) or the configuration file (codex, opencode, pi) that makes a "
                    "client use the running server, with its context and long time-outs. Changes nothing.")
    parser.add_argument("client", nargs="?", metavar="CLIENT", choices=NAMES, help="|".join(NAMES))
    parser.add_argument("--url", metavar="URL", help="where the server listens (http://127.0.0.1:8000)")
    parser.add_argument("--api-key", metavar="K", help="the server's key, if it has one; it is part of what is printed")
    parser.add_argument("--check", action="store_true",
                        help="ask the server as the client would: one tool call and its result")
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings")
    parser.add_argument("--debug", action="store_true", help="show where an error came from")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """0; 1 when a check finds a fault. Raises UsageError without a client, Ds4Error when no server answers."""
    if args.client is None:
        raise UsageError(f"no client is named; give one of {', '.join(NAMES)}")
    from ds4mlx.cli.wire_check import find_server, is_served
    from ds4mlx.cli.wire_setup import CLIENTS
    from ds4mlx.config import Settings
    settings, client = Settings.load("serve", vars(args)), CLIENTS[args.client]   # as the server is told
    server = find_server(base_url(args.url or server_address(settings)), settings.api_key)
    if args.check:
        return _check(client, server)
    sys.stdout.write(client.setup(server))
    print(f"belongs into {client.place}", file=sys.stderr)
    if not is_served(server, client.path):
        print(f"warning: POST {client.path} is not registered on this server yet; {client.name} needs it",
              file=sys.stderr)
    if server.context < client.first_prompt + server.output:
        print(f"warning: {client.name}'s own texts are some {client.first_prompt:,} tokens, and the server's context "
              f"is {server.context:,}; start it with a larger --ctx", file=sys.stderr)
    return 0


def base_url(url: str, told: str = "--url") -> str:
    """A server's address as clients extend it. Raises UsageError for anything but http and https."""
    if not url.startswith(("http://", "https://")) or not url.split("://", 1)[1].strip("/"):
        raise UsageError(f"{told} is {url!r}, need http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")


def server_address(settings: "Settings") -> str:
    """Where a server with these settings listens."""
    if settings.host.startswith("unix:"):
        raise UsageError(f"--host is {settings.host!r}, and no client can use a socket file; give a URL")
    host = ANY_ADDRESS.get(settings.host, settings.host)
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def _check(client: "Client", server: "Endpoint") -> int:
    from ds4mlx.cli.wire_check import check
    print(f"{client.name}: POST {client.path} at {server.url}, {server.model}, context {server.context:,} tokens")
    sound = True
    for finding in check(client, server):
        sound = sound and finding.ok
        print(f"  {'ok  ' if finding.ok else 'FAIL'}  {finding.what}: {finding.told}", flush=True)
    return 0 if sound else 1
