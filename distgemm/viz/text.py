"""Schedules and plans as text: tile grids; shards, ops, bytes and workspace."""

from __future__ import annotations

import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Protocol

from distgemm.arguments import boolean, instance, integer
from distgemm.plan.ops import Copy, Gemm, Op, Reduce, box_extents, box_size, link_of
from distgemm.plan.plan import ROW_ALIGNMENT, Plan
from distgemm.plan.problem import DTYPE_BYTES
from distgemm.plan.scaling import SCALE_OPERANDS, scaling_name
from distgemm.schedulers import AddPlace, DistributedTileScheduler
from distgemm.schedulers.symmetry import MODES

__all__ = ["op_text", "show_plan", "show_schedule", "show_tile_order"]

LIMIT = 16
"""Default number of rows and columns of a table; a line below it says what is left out."""

WIDTH = 100
"""Characters of a line of a grid by default."""

OP_KINDS = ("Gemm", "Copy", "Reduce", "Signal", "Wait", "Barrier")


# --- schedules ------------------------------------------------------------------------------------------


def show_schedule(scheduler: DistributedTileScheduler, *, limit: int = LIMIT, width: int | None = None) -> str:
    """A schedule as text: its routes, its work table, and a grid of tiles for each of A, B and D.

    A cell of a grid names the rank that holds the tile, and rank:iteration for each use.

    Args:
        scheduler: what is shown.
        limit: rows and columns of each table; a line says what is left out.
        width: characters of a line; wider tables continue below with further columns. None: no limit, except that
            cells of a grid are broken into lines to stay within ``WIDTH`` characters if that is possible.

    Raises:
        ValueError: for a scheduler, a limit or a width that is none.
    """
    instance("scheduler", scheduler, DistributedTileScheduler, "a DistributedTileScheduler")
    limit, width = _sizes(limit, width)
    grid = scheduler.grid
    head = (
        f"{scheduler.name}: {_count(scheduler.world_size, 'rank')}{_mesh(scheduler.mesh)}, "
        f"{_count(scheduler.iterations, 'iteration')}, work tiles m {grid.m}, n {grid.n}, k {grid.k}, l {grid.l}"
    )
    uses = {operand: _uses(scheduler, operand) for operand in MODES}
    about = [head, _routes(scheduler, uses)]
    parts = ["\n".join(_wrapped(line, width) for line in about), _work_table(scheduler, limit, width)]
    for operand in MODES:
        parts += _grids(scheduler, operand, uses[operand], limit, width)
    legend = (
        "[r]: r holds the tile of A or B at the start, owns the tile of D at the end",
        "r:i: rank r reads the tile of A or B, or adds to the tile of D, in iteration i; *: in all iterations",
    )
    parts.append("\n".join(_wrapped(line, width) for line in legend))
    return "\n\n".join(parts)


def _sizes(limit: int, width: int | None) -> tuple[int, int | None]:
    """The limit and the width of tables, checked."""
    return integer("limit", limit), None if width is None else integer("width", width)


Uses = dict[tuple[int, ...], dict[int, list[int]]]
"""For each tile of an operand and each rank, the iterations that use the tile."""


def _uses(scheduler: DistributedTileScheduler, operand: str) -> Uses:
    found: Uses = defaultdict(lambda: defaultdict(list))
    for rank in range(scheduler.world_size):
        for iteration in range(scheduler.iterations):
            work = scheduler.work_tile(iteration, rank)
            if work is not None:
                found[tuple(getattr(work, mode) for mode in MODES[operand])][rank].append(iteration)
    return found


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _mesh(mesh: tuple[int, ...]) -> str:
    return f" as {'x'.join(map(str, mesh))}" if len(mesh) > 1 else ""


def _numbers(values: Iterable[int], total: int, every: str) -> str:
    """Numbers with runs as "0-2,5"; ``every`` if they are all of several."""
    ordered = sorted(set(values))
    if total > 1 and len(ordered) == total:
        return every
    runs: list[list[int]] = []
    for value in ordered:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def _route_name(route: object) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", type(route).__name__).lower()


ADDITIONS: dict[tuple[AddPlace, AddPlace], str] = {
    ("epilogue", "epilogue"): "each rank adds what it receives",
    ("epilogue", "kernel"): "each rank adds what it receives, the last one in a kernel of its own",
    ("kernel", "epilogue"): "added in the epilogue of the reducer's last GEMM",
    ("kernel", "kernel"): "one final sum",
}
"""What a rank does with partial sums, by ``add`` and ``final_add`` of a ReduceRoute."""


def _routes(scheduler: DistributedTileScheduler, uses: dict[str, Uses]) -> str:
    """The routes of what moves."""
    said = []
    for operand, route in (("A", scheduler.route.a), ("B", scheduler.route.b)):
        moves = any(not set(ranks) <= set(scheduler.owner(operand, tile)) for tile, ranks in uses[operand].items())
        said.append(f"{operand} {_route_name(route) if moves else 'stays'}")
    owners = {tile: scheduler.owner("D", tile) for tile in uses["D"]}
    reduced = any(len(ranks) > 1 or not set(ranks) <= set(owners[tile]) for tile, ranks in uses["D"].items())
    result = "D stays"
    copies = scheduler.route.final_copies
    if reduced:
        reduce = scheduler.route.d
        where = " on every owner" if copies is None else ""
        result = f"D {_route_name(reduce)} ({ADDITIONS[reduce.add, reduce.final_add]}{where})"
    if copies is not None and any(len(ranks) > 1 for ranks in owners.values()):
        result += f", final copies {_route_name(copies)}"
    return f"routes: {'; '.join([*said, result])}"


def _work_table(scheduler: DistributedTileScheduler, limit: int, width: int | None) -> str:
    modes = [mode for mode in "mnkl" if mode != "l" or scheduler.grid.l > 1]
    ranks, iterations = range(scheduler.world_size), range(scheduler.iterations)
    rows = [["", *map(str, iterations[:limit])]]
    for rank in ranks[:limit]:
        tiles = [scheduler.work_tile(iteration, rank) for iteration in iterations[:limit]]
        cells = ["-" if tile is None else ",".join(str(getattr(tile, mode)) for mode in modes) for tile in tiles]
        rows.append([f"rank {rank}", *cells])
    idle = "; -: idle" if any("-" in row[1:] for row in rows[1:]) else ""
    title = f"work ({', '.join(modes)}): rows are ranks, columns iterations{idle}"
    return "\n".join([title, *_table(rows, width), *_left_out(("ranks", ranks), ("iterations", iterations), limit)])


def _wrapped(line: str, width: int | None) -> str:
    """The line in lines of at most ``width`` characters, if its words allow that."""
    if width is None:
        return line
    return textwrap.fill(line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _table(rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Lines with right-aligned columns, the first left-aligned. Columns that do not fit continue below."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines: list[str] = []
    first = 1
    while first < len(widths):
        end, used = first + 1, widths[0] + 2 + widths[first]
        while end < len(widths) and (width is None or used + 2 + widths[end] <= width):
            used += 2 + widths[end]
            end += 1
        for row in rows:
            cells = (row[column].rjust(widths[column]) for column in range(first, end))
            lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
        first = end
    return lines


def _left_out(first: tuple[str, Sequence[int]], second: tuple[str, Sequence[int]], limit: int) -> list[str]:
    """A line that says which rows and columns a table leaves out."""
    cut = [f"{limit} of {len(values)} {what}" for what, values in (first, second) if len(values) > limit]
    if not cut:
        return []
    rows, columns = len(first[1]), len(second[1])
    missing = rows * columns - min(rows, limit) * min(columns, limit)
    return [f"... {' and '.join(cut)} shown, {missing} of {rows * columns} cells left out"]


def _grids(scheduler: DistributedTileScheduler, operand: str, uses: Uses, limit: int, width: int | None) -> list[str]:
    """The grid of an operand, one for each l."""
    row, column, _ = MODES[operand]
    batches = range(scheduler.grid.l)
    found = []
    for batch in batches[:limit]:
        where = f", l {batch}" if len(batches) > 1 else ""
        rows, columns = range(getattr(scheduler.grid, row)), range(getattr(scheduler.grid, column))
        cells = [[_cell(scheduler, operand, (r, c, batch), uses, limit) for c in columns[:limit]] for r in rows[:limit]]
        title = f"{operand} ({row}, {column}){where}"
        left_out = _left_out((f"rows ({row})", rows), (f"columns ({column})", columns), limit)
        found.append("\n".join([title, *_boxes(row, column, cells, width), *left_out]))
    if len(batches) > limit:
        found[-1] += f"\n... {limit} of {len(batches)} grids of {operand} (l) shown"
    return found


def _cell(
    scheduler: DistributedTileScheduler, operand: str, tile: tuple[int, ...], uses: Uses, limit: int
) -> list[str]:
    """The holder of a tile, then rank:iteration of each use."""
    by_rank = uses.get(tile, {})
    order = sorted(by_rank, key=lambda rank: (by_rank[rank], rank))
    tokens = [f"[{_numbers(scheduler.owner(operand, tile), scheduler.world_size, 'all')}]"]
    tokens += [f"{rank}:{_numbers(by_rank[rank], scheduler.iterations, '*')}" for rank in order[:limit]]
    if len(order) > limit:
        tokens.append(f"+{len(order) - limit} more")
    return tokens


def _boxes(row: str, column: str, cells: list[list[list[str]]], width: int | None) -> list[str]:
    """Lines of a grid. Columns that do not fit continue below."""
    if width is None:
        return _box_rows(row, column, 0, cells, WIDTH)
    narrowest = max(
        len(f"{column} {len(cells[0]) - 1}"), *(len(token) for line in cells for tokens in line for token in tokens)
    )
    fitting = max(1, (width - len(f"{row} {len(cells) - 1}") - 2) // (narrowest + 3))
    lines: list[str] = []
    for first in range(0, len(cells[0]), fitting):
        lines += _box_rows(row, column, first, [line[first : first + fitting] for line in cells], width)
    return lines


def _box_rows(row: str, column: str, first: int, cells: list[list[list[str]]], most: int) -> list[str]:
    """Lines of a grid: each cell on one line if they all fit, else its first word above the others."""
    columns = len(cells[0])
    labels = [f"{row} {index}".ljust(len(f"{row} {len(cells) - 1}")) for index in range(len(cells))]
    room = (most - len(labels[0]) - 3) // columns - 3
    texts = [[[" ".join(tokens)] for tokens in line] for line in cells]
    stacked = max(len(text[0]) for line in texts for text in line) > room
    if stacked:
        width = max(len(token) for line in cells for tokens in line for token in tokens[1:] or [""])
        texts = [[_stack(tokens, width, max(1, (room + 1) // (width + 1))) for tokens in line] for line in cells]
    titles = [f"{column} {first + index}" for index in range(columns)]
    width = max([*map(len, titles), *(len(part) for line in texts for text in line for part in text)])
    rule = f"{' ' * len(labels[0])} |{'|'.join(['-' * (width + 2)] * columns)}|"
    lines = [f"{' ' * len(labels[0])}   {'   '.join(title.ljust(width) for title in titles)}".rstrip(), rule]
    for label, line in zip(labels, texts, strict=True):
        for number in range(max(map(len, line))):
            parts = [text[number] if number < len(text) else "" for text in line]
            side = label if number == 0 else " " * len(label)
            lines.append(f"{side} | {' | '.join(part.ljust(width) for part in parts)} |")
        if stacked:
            lines.append(rule)
    return lines if stacked else [*lines, rule]


def _stack(tokens: list[str], width: int, count: int) -> list[str]:
    rest = [token.ljust(width) for token in tokens[1:]]
    return [tokens[0], *(" ".join(rest[at : at + count]).rstrip() for at in range(0, len(rest), count))]


# --- tiles ----------------------------------------------------------------------------------------------


Place = tuple[int, int, int]
"""A cluster of tiles: how far behind a rank its shard is, and its row and column of clusters there."""


class TileOrder(Protocol):
    """What is drawn of a :class:`distgemm.gemm.per_tile.order.TileOrder`."""

    @property
    def distances(self) -> tuple[int, ...]: ...
    @property
    def blocks(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def lead(self) -> int: ...
    @property
    def own_first(self) -> bool: ...
    def of_unit(self, distance: int, unit: int) -> Place: ...
    def __iter__(self) -> Iterator[Place]: ...


def show_tile_order(
    order: TileOrder, rank: int = 0, *, ranks: int | None = None, limit: int = LIMIT, width: int | None = None
) -> str:
    """The order of a rank's tiles as text: the units of a shard, and the ticket of each cluster of tiles of D.

    Args:
        order: what is shown.
        rank: whose tickets.
        ranks: number of ranks; None: as many as shards.
        limit: rows and columns of each table; a line says what is left out.
        width: characters of a line; wider tables continue below with further columns. None: no limit.

    Raises:
        ValueError: for a rank that the order does not have, and for a limit or a width that is none.
    """
    shards, blocks, columns = len(order.distances) + 1, range(order.blocks), range(order.columns)
    ranks = ranks or shards
    rank = integer("rank", rank, 0, ranks - 1)
    limit, width = _sizes(limit, width)
    units = {order.of_unit(0, unit): unit for unit in range(order.blocks * order.columns)}
    tickets = {tile: ticket for ticket, tile in enumerate(order)}
    rest = "its tiles are of one shard"
    if shards > 1:
        others = ", ".join(str((rank + distance) % ranks) for distance in order.distances)
        earlier = "earlier" if order.own_first else "later"
        rest = f"own tiles come {_count(order.lead, 'unit')} {earlier}; shards in the order {others}"
    head = (
        f"rank {rank} of {ranks}: {order.blocks}x{order.columns} clusters of tiles in each shard, "
        f"{_count(order.group, 'row')} of clusters in turn; {rest}"
    )
    titles = ["", *map(str, columns[:limit])]
    table = [titles]
    for block in blocks[:limit]:
        cells = (str(units[0, block, column]) for column in columns[:limit])
        table.append([f"block {block}", *cells])
    left_out = _left_out(("blocks", blocks), ("columns", columns), limit)
    parts = ["\n".join(["units of a shard, by row and column of clusters", *_table(table, width), *left_out])]
    table = [titles]
    rows = [(shard, block) for shard in (range(ranks) if shards > 1 else [rank]) for block in blocks]
    for shard, block in rows[:limit]:
        found = (tickets[(shard - rank) % ranks, block, column] for column in columns[:limit])
        cells = (str(ticket) if shards == 1 else f"[{ticket}]" if shard == rank else f"{ticket} " for ticket in found)
        table.append([f"shard {shard}, block {block}" if shards > 1 else f"block {block}", *cells])
    lines = [line.rstrip() for line in _table(table, width)]
    left_out = _left_out(("rows", range(len(rows))), ("columns", columns), limit)
    title = f"tickets of D; [t]: own shard, of rank {rank}" if shards > 1 else "tickets of D"
    parts.append("\n".join([title, *lines, *left_out]))
    return "\n\n".join([_wrapped(head, width), *parts])


# --- plans ----------------------------------------------------------------------------------------------


def show_plan(
    plan: Plan, *, ops: bool = False, rank: int | None = None, limit: int = LIMIT, width: int | None = None
) -> str:
    """A plan as text: shards, workspace, number of ops by class, bytes over each link, totals.

    Args:
        plan: what is shown.
        ops: list the ops of all ranks.
        rank: list the ops of this rank.
        limit: rows and columns of each table; a line says what is left out.
        width: characters of a line; wider tables continue below with further columns. None: no limit.

    Raises:
        ValueError: for a rank that the plan does not have, and for a plan, a limit or a width that is none.
    """
    instance("plan", plan, Plan, "a distgemm.Plan")
    boolean("ops", ops)
    limit, width = _sizes(limit, width)
    listed = range(plan.world_size) if rank is None else [integer("rank", rank, 0, plan.world_size - 1)]
    parts = [
        "\n".join(_wrapped(line, width) for line in _plan_head(plan)),
        _shards(plan, limit, width),
        _slots(plan, limit, width),
        _op_counts(plan, limit, width),
        _links(plan, limit, width),
        _wrapped(_totals(plan), width),
    ]
    if ops or rank is not None:
        for number in listed:
            lines = [f"ops of rank {number}", *(_wrapped(op_text(op), width) for op in plan.ops(number))]
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _plan_head(plan: Plan) -> list[str]:
    problem = plan.problem
    shares = {mode: getattr(problem, f"{mode}_per_rank") for mode in "mnk"}
    rows = "".join(f", {mode} per rank {','.join(map(str, each))}" for mode, each in shares.items() if each is not None)
    groups = f", {problem.groups} groups of rows" if problem.groups > 1 else ""
    b = f" x {problem.b_dtype}" if problem.b_dtype else ""
    scales = f", scales {scaling_name(problem.scaling)}" if problem.scaling else ""
    tiles = ", ".join(f"{mode} {_tiles(edges)}" for mode, edges in zip("mnkl", plan.edges, strict=True))
    return [
        f"{plan.schedule}: {_count(plan.world_size, 'rank')}{_mesh(plan.mesh)}{_hosts(plan)}, "
        f"{_count(plan.iterations, 'iteration')}, workspace {plan.workspace}, sync {plan.sync}, "
        f"mechanism {plan.mechanism}",
        f"problem: m {problem.m}, n {problem.n}, k {problem.k}, l {problem.l}{groups}{rows}; "
        f"{problem.dtype}{b} -> {problem.out_dtype}, partial sums {problem.partial_dtype}{scales}",
        f"tiles: {tiles}",
    ]


def _hosts(plan: Plan) -> str:
    if plan.ranks_per_host is None:
        return ""
    return f" on {plan.world_size // plan.ranks_per_host} hosts of {plan.ranks_per_host}"


def _across(plan: Plan) -> str:
    """How many of the bytes go across hosts."""
    if plan.ranks_per_host is None:
        return ""
    links = plan.link_bytes("across")
    return f", {sum(links.values())} of them across hosts over {_count(len(links), 'link')}"


def _tiles(edges: tuple[int, ...]) -> str:
    """Number and lengths of the tiles of a mode: "4 x 16", or "4 x 3..5" where they differ."""
    lengths = [stop - start for start, stop in pairwise(edges)]
    low, high = min(lengths), max(lengths)
    return f"{len(lengths)} x {low}" if low == high else f"{len(lengths)} x {low}..{high}"


def bytes_text(size: float) -> str:
    """A number of bytes with its unit."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"


def _more_ranks(plan: Plan, limit: int) -> list[str]:
    return [f"... {limit} of {plan.world_size} ranks shown"] if plan.world_size > limit else []


def _shards(plan: Plan, limit: int, width: int | None) -> str:
    operands = {"A": "A", "B": "B", "D": "D (and C)"}
    operands |= {} if plan.scale_shards is None else {name: name for name in SCALE_OPERANDS.values()}
    rows = [["shards", *operands.values()]]
    for rank in range(plan.world_size)[:limit]:
        shapes = ("x".join(map(str, plan.shard_shape(operand, rank))) for operand in operands)
        rows.append([f"rank {rank}", *shapes])
    return "\n".join([*_table(rows, width), *_more_ranks(plan, limit)])


def _slots(plan: Plan, limit: int, width: int | None) -> str:
    rows = [["workspace", "slots", "bytes", ""]]
    for rank, slots in enumerate(plan.slots[:limit]):
        kinds = Counter(f"{slot.elements} {slot.dtype}" for slot in slots)
        held = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        rows.append([f"rank {rank}", str(len(slots)), bytes_text(plan.workspace_bytes(rank)), held])
    # The last column is text, which reads better left-aligned.
    text_width = max(len(row[-1]) for row in rows)
    lines = [line.rstrip() for line in _table([[*row[:-1], row[-1].ljust(text_width)] for row in rows], width)]
    padded = ", ".join(f"{columns} -> {pitch}" for columns, pitch in plan.padded_rows)
    note = [f"rows padded to {ROW_ALIGNMENT} bytes: {padded} elements"] if padded else []
    return "\n".join([*lines, *note, *_more_ranks(plan, limit)])


def _op_counts(plan: Plan, limit: int, width: int | None) -> str:
    rows = [["ops", *OP_KINDS, "all"]]
    for rank, ops in enumerate(plan.rank_ops[:limit]):
        kinds = Counter(op.kind for op in ops)
        rows.append([f"rank {rank}", *(str(kinds[kind]) for kind in OP_KINDS), str(len(ops))])
    return "\n".join([*_table(rows, width), *_more_ranks(plan, limit)])


def _links(plan: Plan, limit: int, width: int | None) -> str:
    links = plan.link_bytes()
    if not links:
        return "link bytes: none, nothing moves between ranks"
    ranks = range(plan.world_size)
    rows = [["link bytes", *(f"to {rank}" for rank in ranks[:limit]), "sent"]]
    for src in ranks[:limit]:
        cells = [
            bytes_text(links[src, dst]) + "*" * plan.across(src, dst) if (src, dst) in links else "."
            for dst in ranks[:limit]
        ]
        rows.append([f"from {src}", *cells, bytes_text(sum(size for link, size in links.items() if link[0] == src))])
    received = [bytes_text(sum(size for link, size in links.items() if link[1] == dst)) for dst in ranks[:limit]]
    rows.append(["received", *received, bytes_text(sum(links.values()))])
    note = ["* across hosts"] if plan.link_bytes("across") else []
    return "\n".join([*_table(rows, width), *note, *_left_out(("senders", ranks), ("receivers", ranks), limit)])


def _totals(plan: Plan) -> str:
    links = plan.link_bytes()
    ops = [op for of_rank in plan.rank_ops for op in of_rank]
    flops = sum(2 * box_size(op.a.box) * box_extents(op.b.box)[1] for op in ops if isinstance(op, Gemm))
    workspace = max(plan.workspace_bytes(rank) for rank in range(plan.world_size))
    scales = ""
    if plan.scale_shards is not None:
        moved = [op.dst for op in ops if isinstance(op, Copy) and op.operand in SCALE_OPERANDS.values() and link_of(op)]
        size = sum(box_size(view.box) * DTYPE_BYTES[plan.dtype(view)] for view in moved)
        scales = f", {size} of them scales"
    return (
        f"totals: {_count(len(ops), 'op')}, {flops} flop, {sum(links.values())} bytes over {_count(len(links), 'link')}"
        f"{_across(plan)}{scales} ({max(links.values(), default=0)} on the busiest), at most {workspace} bytes of "
        "workspace on a rank"
    )


def op_text(op: Op) -> str:
    """An op as one line: what it computes, and the ops of its rank that it follows."""
    text = op.describe()
    if isinstance(op, (Gemm, Reduce)):
        terms = [f"{op.a} * {op.b}"] if isinstance(op, Gemm) else []
        terms += map(str, op.sources)
        if isinstance(op, Gemm) and op.scales:
            terms[0] += f" (scales {op.scale_a} and {op.scale_b})"
        if op.c is not None:
            terms.append(f"beta * {op.c}")
        text += f": {' + '.join(terms)} -> {op.out}"
    return f"{text}; after {', '.join(f'#{dep}' for dep in op.deps)}" if op.deps else text
