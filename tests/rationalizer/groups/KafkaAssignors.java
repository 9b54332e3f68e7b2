import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.TreeMap;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;

import org.apache.kafka.clients.consumer.ConsumerGroupMetadata;
import org.apache.kafka.clients.consumer.ConsumerPartitionAssignor.Assignment;
import org.apache.kafka.clients.consumer.ConsumerPartitionAssignor.Subscription;
import org.apache.kafka.clients.consumer.RangeAssignor;
import org.apache.kafka.clients.consumer.RoundRobinAssignor;
import org.apache.kafka.clients.consumer.StickyAssignor;
import org.apache.kafka.clients.consumer.internals.AbstractPartitionAssignor;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.coordinator.group.api.assignor.GroupAssignment;
import org.apache.kafka.coordinator.group.api.assignor.MemberAssignment;
import org.apache.kafka.coordinator.group.api.assignor.SubscribedTopicDescriber;
import org.apache.kafka.coordinator.group.api.assignor.SubscriptionType;
import org.apache.kafka.coordinator.group.assignor.UniformAssignor;
import org.apache.kafka.coordinator.group.modern.GroupSpecImpl;
import org.apache.kafka.coordinator.group.modern.MemberSubscriptionAndAssignmentImpl;

/**
 * Kafka's own assignors, one case a line on stdin, its assignment on stdout:
 * {"assignor": "sticky", "counts": {"t0": 3}, "members": {"m00": {"topics": ["t0"], "had": {"t0": [0, 2]}}}}
 * gives {"t0": ["m00", "m00", "m00"]}.
 */
public class KafkaAssignors {
    private static final ObjectMapper JSON = new ObjectMapper();

    public static void main(String[] args) throws Exception {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
        PrintStream out = new PrintStream(System.out, true);
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            JsonNode asked = JSON.readTree(line);
            Map<String, Integer> counts = new TreeMap<>();
            asked.get("counts").fields().forEachRemaining(each -> counts.put(each.getKey(), each.getValue().asInt()));
            Map<String, String[]> found = new TreeMap<>();
            counts.forEach((topic, count) -> found.put(topic, new String[count]));
            if (asked.get("assignor").asText().equals("uniform")) {
                serverSide(asked.get("members"), counts, found);
            } else {
                clientSide(asked.get("assignor").asText(), asked.get("members"), counts, found);
            }
            out.println(JSON.writeValueAsString(found));
        }
    }

    @SuppressWarnings("removal")
    private static void clientSide(
            String name, JsonNode members, Map<String, Integer> counts, Map<String, String[]> found) {
        Map<String, Subscription> subscriptions = new HashMap<>();
        for (Iterator<Map.Entry<String, JsonNode>> all = members.fields(); all.hasNext(); ) {
            Map.Entry<String, JsonNode> member = all.next();
            List<String> topics = topicsOf(member.getValue());
            Subscription subscription = new Subscription(topics);
            if (name.equals("sticky")) {
                List<TopicPartition> had = new ArrayList<>();
                member.getValue().get("had").fields().forEachRemaining(each -> each.getValue().forEach(
                        partition -> had.add(new TopicPartition(each.getKey(), partition.asInt()))));
                if (!had.isEmpty()) {
                    StickyAssignor assignor = new StickyAssignor();
                    assignor.onAssignment(
                            new Assignment(had), new ConsumerGroupMetadata("g", 1, member.getKey(), Optional.empty()));
                    subscription = new Subscription(topics, assignor.subscriptionUserData(new HashSet<>(topics)));
                }
            }
            subscriptions.put(member.getKey(), subscription);
        }
        AbstractPartitionAssignor assignor = switch (name) {
            case "range" -> new RangeAssignor();
            case "roundrobin" -> new RoundRobinAssignor();
            case "sticky" -> new StickyAssignor();
            default -> throw new IllegalArgumentException(name);
        };
        assignor.assign(counts, subscriptions).forEach((member, partitions) -> partitions.forEach(
                each -> found.get(each.topic())[each.partition()] = member));
    }

    private static void serverSide(JsonNode members, Map<String, Integer> counts, Map<String, String[]> found) {
        Map<String, Uuid> ids = new HashMap<>();
        Map<Uuid, String> names = new HashMap<>();
        for (String topic : counts.keySet()) {
            Uuid id = new Uuid(1, ids.size() + 1);
            ids.put(topic, id);
            names.put(id, topic);
        }
        Map<String, MemberSubscriptionAndAssignmentImpl> group = new HashMap<>();
        Map<Uuid, Map<Integer, String>> inverted = new HashMap<>();
        Set<Set<Uuid>> subscriptions = new HashSet<>();
        for (Iterator<Map.Entry<String, JsonNode>> all = members.fields(); all.hasNext(); ) {
            Map.Entry<String, JsonNode> member = all.next();
            Set<Uuid> topics = new HashSet<>();
            topicsOf(member.getValue()).forEach(topic -> topics.add(ids.get(topic)));
            subscriptions.add(topics);
            Map<Uuid, Set<Integer>> had = new HashMap<>();
            member.getValue().get("had").fields().forEachRemaining(each -> each.getValue().forEach(partition -> {
                Uuid id = ids.get(each.getKey());
                had.computeIfAbsent(id, any -> new HashSet<>()).add(partition.asInt());
                inverted.computeIfAbsent(id, any -> new HashMap<>()).put(partition.asInt(), member.getKey());
            }));
            group.put(member.getKey(), new MemberSubscriptionAndAssignmentImpl(
                    Optional.empty(), Optional.empty(), topics,
                    new org.apache.kafka.coordinator.group.modern.Assignment(had)));
        }
        SubscriptionType type =
                subscriptions.size() > 1 ? SubscriptionType.HETEROGENEOUS : SubscriptionType.HOMOGENEOUS;
        GroupAssignment assignment = new UniformAssignor().assign(
                new GroupSpecImpl(group, type, inverted),
                new SubscribedTopicDescriber() {
                    @Override
                    public int numPartitions(Uuid topic) {
                        return counts.get(names.get(topic));
                    }

                    @Override
                    public Set<String> racksForPartition(Uuid topic, int partition) {
                        return Set.of();
                    }
                });
        for (Map.Entry<String, MemberAssignment> member : assignment.members().entrySet()) {
            member.getValue().partitions().forEach((id, partitions) -> partitions.forEach(
                    partition -> found.get(names.get(id))[partition] = member.getKey()));
        }
    }

    private static List<String> topicsOf(JsonNode member) {
        List<String> topics = new ArrayList<>();
        member.get("topics").forEach(topic -> topics.add(topic.asText()));
        return topics;
    }
}
