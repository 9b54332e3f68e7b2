"""Kafka by way of confluent-kafka: the only package that knows librdkafka.

==================  ==================================================================================
``settings``        which properties our clients run with, and which a user may not set
``callbacks``       the user's functions in a configuration, behind a guard
``errors``          librdkafka's errors become ours, here and nowhere else
``reading``         what both readers share: a read that is fast and returns early, a safe close
``tail``            :class:`~kafka_marshal.adapters.kafka.tail.KafkaTail`: the coordination topic onwards
``sending``         what both writers share: acks put aside, a flush that survives a fatal error, a safe close
``appender``        :class:`~kafka_marshal.adapters.kafka.appender.KafkaAppender`: to the coordination topic
``producer``        :class:`~kafka_marshal.adapters.kafka.producer.KafkaProducer`: to users' topics (dead letters)
``data_reader``     :class:`~kafka_marshal.adapters.kafka.data_reader.KafkaDataReader`: the user's messages
``range_reader``    one range of offsets, once: what Spark's executors do for the stream source
``admin_client``    an AdminClient that several threads share, destroyed at a known place
``questions``       what is asked of the brokers, again while the answer passes by itself
``cluster``         :class:`KafkaCluster`: look-ups, and the factory of the others
==================  ==================================================================================
"""

from kafka_marshal.adapters.kafka.cluster import KafkaCluster

__all__ = ["KafkaCluster"]
