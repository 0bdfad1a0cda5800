"""Runtimes: they execute ``plan.ops`` and know nothing of schedules."""
