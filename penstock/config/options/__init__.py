"""The options of ``penstock serve``, one Struct for each group.

Each Struct inherits from the group before it, because a msgspec Struct has at most one base with fields.
:class:`penstock.config.serve.ServeConfig` ends the chain and checks combinations. The order of the
groups is the order of ``--help``. ``kw_only`` is not inherited: every Struct repeats it.
"""
