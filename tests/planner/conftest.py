from hypothesis import settings

# The same examples on every machine, and no failure because a machine was busy.
settings.register_profile("gradaccum", deadline=None, derandomize=True)
settings.load_profile("gradaccum")
