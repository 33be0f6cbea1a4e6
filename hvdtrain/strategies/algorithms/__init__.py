"""When ranks exchange what: an algorithm uses a reducer, or the framework's own collectives."""
