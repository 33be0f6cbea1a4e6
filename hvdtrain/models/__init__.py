"""Models: for each a neutral file (numbers, shapes, layer plan, initial values) and one thin twin per framework.

Import the file you need; this package loads no framework by itself.
"""
