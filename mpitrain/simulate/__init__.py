"""How a training would scale on machines that are not here: a discrete-event simulation of its messages.

The algorithms are the ones that run (mpitrain/allreduce). They are driven over a simulated transport, with arrays that
have no contents: nothing is added, copied or sent, but each message and each addition takes its time.
"""
