"""What is taken from the other side of a federation, at most. Beyond these a message is refused, whoever sent it."""

NAME = 200  # characters of a name: a client's, a class's, a silo's, an array's is longer
TEXT = 400  # characters of a reason
ARRAY_NAME = 1000  # characters: the path of a tensor in its tree

HEADER_BYTES = 2**25  # of a message's JSON
ARRAYS = 100_000  # of a message, and entries of a tree
DEEPEST = 20  # levels of a tree
DIMENSIONS = 16  # of an array
SIDE = 2**40  # of an array, along one dimension

CLIENTS = 100_000  # of a federation
CLASSES = 30_000
SAMPLES = 2**31  # of a client, in one split
SAMPLE_SIDE = 2**20  # of a sample, along one dimension
SAMPLE_NUMBERS = 2**26  # in a sample
FIGURES = 20  # of a model, by name
LARGEST_FIGURE = 1e30  # of a loss, or of what is no fraction
RUNS = 100  # that a silo with samples of its own opens, unless its people say otherwise (--runs)
SHARED_RUNS = 10_000  # the same of a node that hosts simulated clients
WORK = 2**40  # samples that a node says it has computed on, in one exchange
VERSIONS = 100  # of a client's state that a silo says it has
