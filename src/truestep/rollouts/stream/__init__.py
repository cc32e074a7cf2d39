"""Documents that are sent during the run: over Redis, as files in a watched directory, or by a user's function.

source            the source of streamed documents, for the trainer
reading           a thread that fetches and parses messages ahead
intake            groups of received documents, complete or open; ids: the ids of all received documents
transport         the interface of transports; redis, directory, given: the transports
watched           how far a file of a watched directory was read
announcements     events for the senders: new weights, the end of training
"""
