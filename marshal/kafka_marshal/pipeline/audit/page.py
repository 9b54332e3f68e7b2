"""The report's page (Jinja2, everything escaped)."""

from __future__ import annotations

from typing import Final

__all__ = ["TEMPLATE"]

TEMPLATE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>Audit: {{ findings.verdict | plain }}</title>
<style>
:root { color-scheme: light }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.5rem; line-height: 1.3; padding: .8rem 1rem; border-left: .5rem solid; border-radius: .2rem }
h1.clean { background: #e6f4ef; border-color: #009e73 }
h1.wrong { background: #fbe9e0; border-color: #d55e00 }
h2 { font-size: 1.15rem; margin-top: 2.2rem }
figure { margin: 0 }
img { width: 100%; height: auto }
div.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .93rem }
th, td { text-align: left; padding: .25rem 1.1rem .25rem 0; border-bottom: 1px solid #e2e2e2; vertical-align: top;
  overflow-wrap: anywhere }
th { font-weight: 600; border-color: #999; white-space: nowrap }
td.number, th.number { text-align: right; white-space: nowrap }
code { font-size: .9rem }
figcaption, .note { color: #555; font-size: .93rem }
</style>
</head>
<body>
<h1 class="{{ 'clean' if findings.is_clean else 'wrong' }}">{{ findings.verdict | plain }}</h1>
<p>{{ findings.source | plain }}, topic <code>{{ findings.topic | plain }}</code>, {{ findings.partitions | length }}
partitions. The whole log was replayed by the rationalizer that every worker runs, and each of its conclusions was held
against what the log had said before.</p>
{% if findings.notices %}
<h2>Good to know</h2>
<ul>
{% for notice in findings.notices %}
<li>{{ notice | plain }}</li>
{% endfor %}
</ul>
{% endif %}
{% if findings.examples %}
<h2>Violations</h2>
<div class="wide"><table>
<tr><th>kind<th class="number">partition<th class="number">offset<th>log time, UTC<th>partition<th>holder until then
<th>what</tr>
{% for each in findings.examples %}
<tr><td>{{ each.kind | plain }}<td class="number">{{ each.partition }}<td class="number">{{ each.offset }}
<td>{{ each.time_ms | time }}
<td>{% if each.group is not none %}{{ each | lease | plain }}{% endif %}

<td>{% if each.client is not none %}{{ each.client | plain }}/{{ each.instance | plain }}, {{ each.epoch }}{% endif %}

<td>{{ each.detail | plain }}</tr>
{% endfor %}
</table></div>
{% if findings.violation_count > findings.examples | length %}
<p class="note">The first {{ findings.examples | length }} of {{ findings.violation_count | number }}; all are in the
table violations.</p>
{% endif %}
{% endif %}
{% if group is not none %}
<p class="note">Pictures and lists of partitions below show the group <code>{{ group | plain }}</code> only; the verdict
is of the whole log.</p>
{% endif %}
{% for picture in pictures %}
<h2>{{ picture.title }}</h2>
<figure><img src="{{ picture.image }}" alt="{{ picture.title }}">
<figcaption>{{ picture.caption }}</figcaption></figure>
{% endfor %}
<h2>Partitions of the log</h2>
<div class="wide"><table>
<tr><th class="number">partition<th class="number">records<th class="number">next offset<th>log time, UTC<th>digest
<th class="number">segments<th class="number">snapshots compared<th class="number">wrong</tr>
{% for each in findings.partitions %}
<tr><td class="number">{{ each.partition }}<td class="number">{{ each.records | number }}
<td class="number">{{ each.next_offset }}<td>{{ each.log_time | time }}<td><code>{{ each.digest }}</code>
<td class="number">{{ each.segments }}<td class="number">{{ each.snapshots }}
<td class="number">{{ each.snapshots_wrong }}</tr>
{% endfor %}
</table></div>
<p class="note">A digest is that of the state: every replica that has read as far has the same.
<code>kafka-marshal replay --state</code> prints it for a dump.</p>
{% if waits %}
<h2>How long each partition waited for its next holder</h2>
<div class="wide"><table>
<tr><th>how it came to it<th>partition<th class="number">count<th class="number">min, ms<th class="number">median, ms
<th class="number">max, ms<th class="number">total, ms</tr>
{% for row in waits %}
<tr><td>{{ wait_names[row.name] }}<td>{{ row | lease | plain }}<td class="number">{{ row.count | number }}
<td class="number">{{ row.min | number }}<td class="number">{{ row.median | number }}
<td class="number">{{ row.max | number }}<td class="number">{{ row.total | number }}</tr>
{% endfor %}
</table></div>
{% if waits_left %}<p class="note">{{ waits_left | number }} more are in the table statistics.</p>{% endif %}

{% endif %}
{% if rebalances %}
<h2>Rebalances of coordinated groups</h2>
<div class="wide"><table>
<tr><th>log time, UTC<th>group<th class="number">generation<th>reason<th>client<th>found dead<th class="number">members
<th class="number">moved at once<th class="number">revoked</tr>
{% for row in rebalances %}
<tr><td>{{ row.time | time }}<td>{{ row.group | plain }}<td class="number">{{ row.generation }}<td>{{ row.reason }}
<td>{{ row.client | plain }}<td>{{ row.died | join(', ') | plain }}<td class="number">{{ row.members }}
<td class="number">{{ row.moved | number }}<td class="number">{{ row.revoked | number }}</tr>
{% endfor %}
</table></div>
<p class="note">The newest first. Moved at once: pieces whose owner had left, died or was replaced. Revoked: pieces
whose owner was told to finish and let go. All others went on.</p>
{% if rebalances_left %}<p class="note">{{ rebalances_left | number }} more are in the table generations.</p>{% endif %}

{% endif %}
{% if churn %}
<h2>How often each partition got a holder</h2>
<div class="wide"><table>
<tr><th>partition<th class="number">times</tr>
{% for row in churn %}
<tr><td>{{ row | lease | plain }}<td class="number">{{ row.count | number }}</tr>
{% endfor %}
</table></div>
{% if churn_left %}<p class="note">{{ churn_left | number }} more are in the table statistics.</p>{% endif %}

{% endif %}
{% if rejected %}
<h2>Requests that the log refused</h2>
<div class="wide"><table>
<tr><th class="number">partition<th>code<th class="number">records</tr>
{% for row in rejected %}
<tr><td class="number">{{ row.partition }}<td>{{ row.code }}<td class="number">{{ row.count | number }}</tr>
{% endfor %}
</table></div>
<p class="note">A refusal is the protocol at work: a request that comes too late changes nothing. PROTOCOL.md explains
the codes.</p>
{% endif %}
<h2>Tables</h2>
<p>Parquet beside this page, for Spark, pandas or any other reader:</p>
<ul>
{% for name, rows in counts.items() %}
<li><code>{{ name }}/</code>, {{ rows | number }} rows</li>
{% endfor %}
</ul>
</body>
</html>
"""
