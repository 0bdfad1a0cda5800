"""Schedules, plans and timelines as text, figures and traces."""
