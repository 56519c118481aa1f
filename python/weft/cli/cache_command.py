"""`weft cache list|clear|prebuild`: the folder of compiled kernels."""

from __future__ import annotations

import dataclasses
import datetime
import time
from typing import Annotated

import typer

from weft import env
from weft.bench.facts import commit, cpu_name
from weft.cli import options
from weft.cli.options import examples_epilog
from weft.cli.output import command_output
from weft.errors import InvalidArgument
from weft.kernels import cache as kernel_cache
from weft.kernels.paths import nvrtc_version
from weft.kernels.prebuild import ARCHITECTURES, KernelShape, prebuild
from weft.limits import LAYOUTS
from weft.machine import where

cache = typer.Typer(help="The folder of compiled kernels.", no_args_is_help=True, add_completion=False)

_FOLDER_HELP = "Another folder than the one that WEFT_CACHE_DIR or ~/.cache gives."
Folder = Annotated[str | None, typer.Option("--folder", help=_FOLDER_HELP)]


@cache.command("list", epilog=examples_epilog(["weft cache list", "weft cache list --folder /data/weft-kernels"]))
def list_kernels(folder: Folder = None, json: options.Json = False) -> None:
    """Show the kernels in the cache."""
    with command_output(json_lines=json) as output:
        target = env.cache_folder() if folder is None else folder
        found = kernel_cache.entries(target)
        rows = []
        for kernel in found:
            written_at = datetime.datetime.fromtimestamp(kernel.written_at, datetime.timezone.utc)
            what = {"name": kernel.name, "layout": kernel.layout, "dtype": kernel.dtype, "tokens": kernel.tokens}
            values = {"key": kernel.key, **what, "arch": kernel.arch, "bytes": kernel.num_bytes}
            output.row({"kind": "kernel", **values, "written_at": written_at.isoformat(timespec="seconds")})
            kib = f"{kernel.num_bytes / 1024:,.0f}"
            rows.append((*(text or "?" for text in what.values()), kernel.arch, kib, f"{written_at:%m-%d %H:%M}"))
        total = sum(kernel.num_bytes for kernel in found)
        output.row({"kind": "cache", "folder": target, "kernels": len(found), "bytes": total})
        if rows:
            columns = ("kernel", "layout", "rows", "T", "arch", "KiB", "written")
            output.table("compiled kernels, newest first; times in UTC", columns, rows, left=range(5))
        output.text(f"{len(found)} kernels, {total:,} bytes in {target or 'no folder: WEFT_CACHE_DIR is empty'}")


@cache.command("clear", epilog=examples_epilog(["weft cache clear", "weft cache clear --folder /data/weft-kernels"]))
def clear(folder: Folder = None, json: options.Json = False) -> None:
    """Remove them; what is needed again is compiled again."""
    with command_output(json_lines=json) as output:
        target = env.cache_folder() if folder is None else folder
        num_files, num_bytes = kernel_cache.clear(target)
        output.row({"kind": "cleared", "folder": target, "files": num_files, "bytes": num_bytes})
        output.text(f"removed {num_files} files, {num_bytes:,} bytes from {target}")


_ARCH_HELP = f"Architecture, may be given several times: {', '.join(ARCHITECTURES)}. Without it sm_90 and sm_100."
_LAYOUT_HELP = "Layout, may be given several times. Without it all."
_SMS_HELP = "SMs that the calls may use (num_sms). Without it what weft chooses."


_PREBUILD_EXAMPLES = (
    "weft cache prebuild --ranks 8 --arch sm_90",
    "weft cache prebuild --hidden 2048 --experts 64 --layout masked --arch sm_90",
)


@cache.command("prebuild", epilog=examples_epilog(_PREBUILD_EXAMPLES))
def prebuild_kernels(
    ranks: options.Ranks = 4,
    tokens: options.Tokens = 4096,
    hidden: options.Hidden = 7168,
    experts: options.Experts = 256,
    top_k: options.TopK = 8,
    dtype: options.Dtype = "bf16",
    num_sms: Annotated[int | None, typer.Option("--num-sms", metavar="N", min=1, help=_SMS_HELP)] = None,
    layout: Annotated[list[str] | None, typer.Option("--layout", help=_LAYOUT_HELP)] = None,
    arch: Annotated[list[str] | None, typer.Option("--arch", help=_ARCH_HELP)] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", metavar="N", min=1, help="Compilations at once; without it a CPU each.")
    ] = None,
    folder: Folder = None,
    json: options.Json = False,
) -> None:
    """Compile the kernels of a shape; needs no GPU. --tokens is max_tokens_per_rank."""
    with command_output(json_lines=json) as output:
        target = env.cache_folder() if folder is None else folder
        if not target:
            raise InvalidArgument("--folder is not given and WEFT_CACHE_DIR is empty: there is no cache to fill")
        shape = KernelShape(
            ranks=ranks,
            experts=experts,
            top_k=top_k,
            hidden=hidden,
            tokens=tokens,
            dtype=dtype,
            layouts=tuple(layout) if layout else LAYOUTS,
        )
        if num_sms is not None:
            shape = dataclasses.replace(shape, num_sms=num_sms, small_num_sms=(num_sms,))
        started = time.perf_counter()
        with output.progress(1, "prebuild", where.read):
            built, num_found = prebuild(shape, arch or ("sm_90", "sm_100"), target, jobs)
        for kernel in built:
            output.row({"kind": "built", **dataclasses.asdict(kernel)})
        seconds = time.perf_counter() - started
        figures = {"kernels": len(built), "found": num_found, "seconds": seconds, "jobs": jobs}
        made_with = {"cpu": cpu_name(), "nvrtc": nvrtc_version(), "commit": commit()}
        output.row({"kind": "prebuilt", "folder": target, **figures, **made_with})
        rows = [(each.name, each.arch, f"{each.seconds:.2f}", f"{each.num_bytes:,}") for each in built]
        output.table(f"compiled into {target}", ("kernel", "arch", "seconds", "bytes"), rows)
        output.text(f"{len(built)} kernels, {num_found} of them there already, {seconds:.1f} s")
