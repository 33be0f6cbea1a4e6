"""Models: each has a description (sizes, shapes, layers, initial values) and one implementation per framework.

Import the file you need; importing this package loads no framework.
"""
