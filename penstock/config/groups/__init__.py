"""Types, bounds and descriptions of the options of ``penstock serve``, a file for each capability.

Names and defaults stand in the Structs of the commands, which use these types: a Struct has one base at
most and cannot be put together from several.
"""
