"""The operations of a decoder, on a CPU and on a GPU."""
