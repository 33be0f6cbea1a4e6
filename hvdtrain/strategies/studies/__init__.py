"""Strategies of published studies, for comparison."""
