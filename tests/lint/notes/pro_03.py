import hotshot  # here: left, a module of Python 2 and not of torch

profile = hotshot.Profile("out.prof")
