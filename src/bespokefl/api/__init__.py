"""The functions of the front door (`import bespokefl as bfl`): what the commands do, with plain Python arguments.

Each calls what its command calls. Imports all rooms but ``cli`` and ``flower``; nothing imports it but the package's
own `__init__`, by name and when it is asked for.
"""
