"""Strategies of published studies, for comparison. They are plug-ins: setup.cfg registers them as entry points."""
