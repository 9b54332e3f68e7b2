"""`kafka-marshal ui`: a live page of groups, and their whole history by a slider.

==============  ==========================================================================================
``command``     the command: options, the server, how it ends
``server``      HTTP: the page, answers in JSON, server-sent events
``guard``       who may ask: hosts, origins, headers
``archive``     reads a log or a dump into a history, in the background; which history answers for a moment
``fold``        records → what is kept of them
``index``       what the history is kept in: arrays
``moments``     answers from it: who owned what, why, what was rejected, what differs
``live``        groups as they are now: lag, rates, problems, as `status` has them
``steering``    the commands that change something: the dry run first, then the same words for good
``static/``     the page: no build step, nothing from elsewhere
==============  ==========================================================================================
"""
