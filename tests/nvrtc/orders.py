"""What orders the memory of a kernel, counted in its PTX, and how much of it the protocol pages ask for.

The compiler neither drops nor adds such instructions, so the numbers are exact, for all shapes; what is inlined in four
places counts four times. A release that records an error is not counted: it would hide that another one is missing.
"""

import re

# In the order of the text; what lies between does not order global memory, nor what bulk copies read and write.
INSTRUCTION = re.compile(
    r"\b(?:(?:st|red)\.release\.\w+|ld\.acquire\.\w+|fence\.(?:proxy|acq_rel)[\w.:]*|bar\.warp\.sync|atom[\w.]*\.cas\.b32"
    r"|cp\.async\.bulk\.(?:wait_group(?:\.read)? \d+|global|shared))"
)
RECORD = r"atom[\w.]*\.cas\.b32"  # each of transport::record(), which has one release
# Chains: patterns of instructions that follow one another, a line each.
RELEASE = r"(?:st|red)\.release\.sys"
ACQUIRE = r"ld\.acquire\.sys"
BULK_COPY = r"cp\.async\.bulk\.(?:global|shared)"
FULL_WAIT = r"cp\.async\.bulk\.wait_group \d+"  # for writes; the one with .read is for shared memory that has been read
FENCE = r"fence\.proxy\.async"
FENCE_GLOBAL = r"fence\.proxy\.async\.global"
FENCE_SHARED = r"fence\.proxy\.async\.shared::cta"
DRAIN = rf"cp\.async\.bulk\.wait_group 0\n{FENCE_GLOBAL}"
FENCE_SYS = rf"{FENCE_GLOBAL}\nfence\.acq_rel\.sys"
SYNC_FENCE = rf"bar\.warp\.sync\n{FENCE_GLOBAL}"
FENCE_SHARED_SYNC = rf"{FENCE_SHARED}\nbar\.warp\.sync"
FENCE_SHARED_STORE = rf"{FENCE_SHARED}\ncp\.async\.bulk\.global"
WAIT_NOTE = rf"{FULL_WAIT}\nst\.release\.cta"
SYNC_NOTE = r"bar\.warp\.sync\nst\.release\.cta"
FENCE_POST = rf"{FENCE}\nst\.release\.sys"
ACQUIRE_FENCE = rf"{ACQUIRE}\n{FENCE}"


def headers(name: str) -> tuple[int, int]:
    """How many kinds of headers a kernel sends and waits for. A small combine sends those of early units too."""
    number = (
        0
        if name in ("unload", "gradients", "place rows", "stage rows", "count picks", "picks of map")
        else 1
        if name == "need room"
        else 3
        if name.startswith("small combine")
        else 2
    )
    return (0 if name.endswith("receives") else number), (0 if name.endswith("sends") else number)


def needs(name: str) -> dict[str, int]:
    """Chains, and how often they are in the kernel of that name (prebuild.kernels)."""
    of_headers = dict(zip((RELEASE, ACQUIRE), headers(name), strict=True))
    more = {RELEASE: 1} if name == "need room" else {}  # the owner word
    if name.startswith("dispatch"):
        more = _needs_of_dispatch(name)
    elif name.startswith("combine"):
        more = _needs_of_combine(name)
    elif name.startswith("small dispatch") and "handle" not in name:  # the host hears of bad ids, and of counts
        more = {RELEASE: (not name.endswith("receives")) + (not name.endswith("sends"))}
    if name.startswith("small"):
        more[BULK_COPY] = 0  # nvlink-small.md: so no proxy fences
    return more | {chain: number + more.get(chain, 0) for chain, number in of_headers.items()}


def _needs_of_dispatch(name: str) -> dict[str, int]:
    """Of nvlink-dispatch.md, "Ordering". Releases: the owner word, at two ends; what the host hears of."""
    is_first, is_quantised = "handle" not in name, re.search(r"fp8(_ue8m0|_pow2)?,", name) is not None
    found = {RELEASE: 2 + 2 * is_first, FULL_WAIT: 1, DRAIN: 1, FENCE_GLOBAL: 1, FENCE_SHARED_SYNC: int(is_quantised)}
    if "rank_major" not in name:
        found[RELEASE] += is_first  # chunks that are planned
        found[ACQUIRE] = 1 + 4  # a token that has come; a queue that is taken over
        found |= {FULL_WAIT: 4, DRAIN: 2, FENCE_GLOBAL: 4, FENCE_SYS: 1, SYNC_FENCE: 2}
        found[FENCE_SHARED_SYNC] += "expert_major" in name  # zeros
    return found


def _needs_of_combine(name: str) -> dict[str, int]:
    """Of nvlink-combine.md, "Ordering". Releases: the owner word, at two ends."""
    has_push, has_side = "from the heap" not in name, name.endswith("side")
    stores_in_bulk = has_push and not stores_by_threads(name)
    return {
        RELEASE: 2 + has_push + has_side,
        ACQUIRE: 2 + has_side,  # progress, waited for and then read again
        FULL_WAIT: 2 * stores_in_bulk,
        WAIT_NOTE: 2 * stores_in_bulk,
        SYNC_NOTE: 3 * stores_by_threads(name),
        FENCE: 2 + stores_in_bulk + (" by pick" in name),
        FENCE_POST: int(stores_in_bulk),
        ACQUIRE_FENCE: 1,
        FENCE_SHARED_STORE: int("by expert" in name and " by pick" not in name),
    }


def stores_by_threads(name: str) -> bool:
    """Rows of a throughput kernel that are not stored in bulk."""
    return name.startswith("combine rank_major") and ", fp8" in name


def unmet(name: str, ptx: str) -> dict[str, int]:
    """Chains of which there are others than the kernel of that name needs: how many more; empty if all is well."""
    lines = "\n".join(INSTRUCTION.findall(ptx))

    def count(chain: str) -> int:
        return len(re.findall(rf"^{chain}$", lines, flags=re.MULTILINE))

    more = {chain: count(chain) - number for chain, number in needs(name).items()}
    more[RELEASE] -= count(RECORD)
    return {chain: number for chain, number in more.items() if number != 0}
