"""The page of `kafka-marshal ui`: groups as they are now, and their whole history by a slider.

==============  ==========================================================================================
``serving``     the server and its threads, from start to end
``server``      HTTP: which requests are allowed, the page, answers in JSON, server-sent events
``archive``     reads a log or a dump into a history, in the background; which history answers for a moment
``fold``        records → what is kept of them
``index``       the arrays in which the history is kept
``moments``     answers from it: who owned what, who waited, what differs
``happened``    answers from it: events, rebalances, the timeline
``live``        groups as they are now: lag, rates, problems, as in `status`
``steering``    the commands that change something: the dry run first, then the same command for good
``static/``     the page: no build step, nothing from elsewhere
==============  ==========================================================================================
"""
