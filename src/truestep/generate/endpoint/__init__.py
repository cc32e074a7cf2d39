"""An endpoint for OpenAI's clients: what a program asks for with one key becomes one document.

document    a document that a program writes, and what its requests get
branches    its sequences: which request goes on from which turn
requests    the three forms of requests
answers     whole answers and streams
messages    chat messages, between clients and chat templates
errors      what is refused, as clients read it
keys        which key is of which document
app         the routes
server      the HTTP server, in a thread of its own
"""
