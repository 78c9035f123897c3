"""Experiments: a TOML file is read, checked and resolved, and every method runs with every seed into its folder.

Here are the file's schema, the runs with their checkpoints, selection and diagnostics, and what resuming checks.
Imports all rooms below (``federation``, ``results``, ``tracking`` and what they build on); tuning, products,
reproduction, ``flower`` and ``cli`` stand on it.
"""
