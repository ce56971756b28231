"""Many methods on many tasks, as one restartable job: a plan, its cells, their records, and what
they say.
"""
