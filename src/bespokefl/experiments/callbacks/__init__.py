"""What `bespoke run` does around the rounds, a callback a file: files, scores, warnings, checkpoints, results.

`bespokefl.experiments.one_run` puts them into a list; a user's own (`module:name` in ``callbacks``) come behind them.
"""
