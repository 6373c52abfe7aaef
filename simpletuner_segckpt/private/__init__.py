"""Names of other libraries that are not part of their public interface, and nothing else.

Nowhere else in this package stands such a name. Each is imported so that this package can be
imported without it, and ``self_test`` says of each what it is for, what happens without it and
whether it is still what it was. ``of_libraries`` and ``of_tomlkit`` import no torch.
"""
