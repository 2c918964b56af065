"""`blockpool version`."""

from typing import Annotated

import typer


def version(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what is installed: the version, which parts are compiled and which hash kernel runs.

    Example: blockpool version --json
    """
    import platform

    import blockpool

    build = blockpool.build_info()
    if as_json:
        import json

        document = {
            "version": build.version,
            "python": platform.python_version(),
            "compiled": build.compiled,
            "hash_kernel": build.hash_kernel,
        }
        typer.echo(json.dumps(document, indent=2))
        return
    typer.echo(f"blockpool {build.version} on Python {platform.python_version()}")
    compiled = [name for name, is_compiled in build.compiled.items() if is_compiled]
    pure = [name for name, is_compiled in build.compiled.items() if not is_compiled]
    if compiled:
        typer.echo(f"compiled: {', '.join(compiled)}")
    if pure:
        typer.echo(f"not compiled (correct, but slow): {', '.join(pure)}")
    typer.echo(f"hash kernel: {build.hash_kernel}")
