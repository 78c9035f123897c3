"""The line: messages and their codec, records of Flower, certificates, SuperLink and its processes."""
