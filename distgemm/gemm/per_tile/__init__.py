"""The per-tile execution: one persistent kernel that waits, stores and signals tile by tile. See docs/per_tile.md.

:mod:`.order` has the order of tiles, :mod:`.verify` its proof, :mod:`.epochs` the numbering of replays, :mod:`.kernel`
what kernels are compiled from, :mod:`.select` which one executes a plan, :mod:`.bind` the parameters of a call,
:mod:`.local` ranks of one process, :mod:`.model` predicted times.
"""
