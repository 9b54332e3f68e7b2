"""The page of `kafka-marshal ui`: groups as they are now, and their whole history by a slider.

==============  ==========================================================================================
``server``      HTTP: the page, answers in JSON, server-sent events; which requests are allowed; its threads
``archive``     reads a log or a dump into a history, in the background; which history answers for a moment
``fold``        records → what is kept of them
``index``       the arrays in which the history is kept
``folding``     folds a long log in processes side by side
``kept``        a history as bytes, and the file in which it is kept between starts
``moments``     answers from it: who owned what, who waited, what differs; events, rebalances, the timeline
``live``        groups as they are now: lag, rates, problems, sharers, open messages, as in `status`
``steering``    the commands that change something: the dry run first, then the same command for good
``static/``     the page: no build step, nothing from elsewhere
==============  ==========================================================================================
"""
