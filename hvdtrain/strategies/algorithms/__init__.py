"""Algorithms: what ranks exchange and when, by a reducer or by the framework's own collectives."""
