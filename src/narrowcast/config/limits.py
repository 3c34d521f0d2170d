"""Upper bounds of a recipe's numbers and texts: more than any machine trains."""

MOST_STEPS = 10**9
"""At a millisecond a step, eleven days; at a second, thirty years."""
UNSETTLED = MOST_STEPS
"""Steps of a recipe that has epochs instead, until its data is known."""
MOST_EPOCHS = 10**6
"""Times through the data; language models are trained with fewer than a hundred."""
MOST_SAMPLES = 2**24
"""Of a micro-batch: 16 million, hundreds of times what any published run takes at once."""
MOST_MICRO_BATCHES = 2**16
"""Of a step; larger batches than this times a device's have not been found to help."""
MOST_WORKERS = 1024
"""Processes that feed one device; the largest hosts have 512 cores."""
MOST_RANKS = 2**16
"""Processes of a run; the largest published runs have 24,576 GPUs."""
MOST_SECONDS = 7 * 24 * 3600
"""A week, the longest that schedulers grant."""
MOST_RESTARTS = 1000
"""Restarts of a run after a failed process."""
MOST_AHEAD = 1024
"""Batches kept ready, all of them in the host's memory."""
LARGEST_RATE = 1e6
"""For learning rates, decays and loss weights: one step takes any weight beyond what fp16 holds."""
LARGEST_FP32 = (2 - 2**-23) * 2.0**127
"""Norms and losses are kept in fp32; a bound beyond it would never be met."""
LARGEST_SCALE = 2.0**126
"""The largest power of two whose inverse fp32 holds too, the format the scale is kept in."""
SMALLEST_SCALE = 2.0**-24
"""The smallest positive value of fp16: a scale below it would flush a gradient of 1."""
LARGEST_INDEX = 2**63 - 1
"""What torch counts elements and seeds with."""
LONGEST_TEXT = 4096
"""Characters of a path, a glob or a line about a recipe; Linux takes no longer path."""
LONGEST_POLICY = 2**16
"""Characters of a policy: some 2,500 exceptions for modules that are named in full."""
LONGEST_NAME = 200
"""Bytes of a run's name: a folder's name has 255, and a number may follow."""
MOST_ENTRIES = 1000
"""Of a list or a mapping: faults, phases, groups of modules."""
MOST_OVERRIDES = 10_000
"""Globs that have a policy of their own; a large mixture of experts has as many modules."""
LARGEST_FILE = 2**20
"""Bytes of a recipe. A full one has 4,000, and YAML is read at about 100 KiB per second."""
MOST_TOLD = 10
"""Problems that a message lists; the rest is counted."""
