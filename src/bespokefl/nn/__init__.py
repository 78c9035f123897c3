"""What stands in the place of a user's layers, so that many clients' networks run as one.

Batch statistics that leave padding out, dropout from keys, convolutions and norms that can be stacked under vmap.
Imports torch only (and the errors). The model of a task is built from these in ``core``, and the engines know them.
"""
