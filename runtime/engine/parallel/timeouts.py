"""Times that ranks of a model wait for each other, in seconds."""

MEET_S = 60.0  # for the others to connect, once all processes run
# in an exchange: the longest time by which ranks on slow, shared cores part in a layer of a prompt
EXCHANGE_S = 300.0
ENDING_S = 3.0  # for a process to end
LOOK_S = 1.0  # between two looks if a thread or a process is still there
