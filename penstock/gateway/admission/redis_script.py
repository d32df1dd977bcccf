"""The script in Redis that reserves and settles, so that gateways do not interfere.

Each client, and each team and model that has budgets, has a hash with the time at which each of its budgets
is full again, in microseconds of the Redis server's clock; a hash for each calendar month with what is used
of the month's budgets; and each client a set of its running requests. All expire when they say nothing more.

A request's name begins with ``GATEWAY/NUMBER.EPOCH/``, the worker that runs it. Each worker that runs any has
a lease, a key that it renews. When a client has no place left, those are freed whose worker has no lease any
more, or is known to have ended by the one that asks, which is of the same gateway.
"""

from __future__ import annotations

SCRIPT = """
-- KEYS: the client's running requests, the worker's lease, then for each budget the hash that has its state.
-- ARGV: reserve, settle or renew; request; time of the lease; time for which a request runs at most;
--       requests at a time (0: any number); the gateway; its workers' first epochs that may live, as
--       'NUMBER EPOCH ...'; the begin of the leases' keys; the most periods until a budget is full;
--       then for each budget: name, charge, amount, period (0: a month). Times are microseconds.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local reserves, most = ARGV[1] == 'reserve', tonumber(ARGV[5])
local FIRST, HASHES, NEVER = 10, 2, 1e15
local MONTHS_MS = 62 * 86400000
local function ms(us)
  return math.ceil(tonumber(us) / 1000)
end
if ARGV[1] == 'renew' or (reserves and most > 0) then
  redis.call('SET', KEYS[2], 1, 'PX', ms(ARGV[3]))
end
if ARGV[1] == 'renew' then
  return {0}
end
local function free_places()
  local alive, first = {}, {}
  for number, epoch in string.gmatch(ARGV[7], '(%d+) (%d+)') do
    first[number] = tonumber(epoch)
  end
  for _, name in ipairs(redis.call('SMEMBERS', KEYS[1])) do
    local worker, gateway, number, epoch = string.match(name, '^(([^/]*)/(%d+)%.(%d+))/')
    worker = worker or name
    if alive[worker] == nil then
      local ended = gateway == ARGV[6] and first[number] and tonumber(epoch) < first[number]
      alive[worker] = not ended and redis.call('EXISTS', ARGV[8] .. worker) == 1
    end
    if not alive[worker] then
      redis.call('SREM', KEYS[1], name)
    end
  end
end
if reserves and most > 0 and redis.call('SCARD', KEYS[1]) >= most then
  free_places()
  if redis.call('SCARD', KEYS[1]) >= most then
    return {2}
  end
end
local full_at, reply, worst, longest = {}, {0, 0, 0}, 0, 0
for i = FIRST, #ARGV, 4 do
  local row = (i - FIRST) / 4 + 1
  local charge, amount, period = tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3])
  local state, missing = redis.call('HGET', KEYS[HASHES + row], ARGV[i]), 0
  if period == 0 then
    local used = tonumber(state or 0)
    missing = used + math.min(charge, amount) > amount and NEVER or 0
    reply[row + 3] = used
  else
    local last = now + ARGV[9] * period
    local at = math.min(math.max(tonumber(state or now), now), last)
    missing = at - now + math.min(charge, amount) * period / amount - period
    reply[row + 3] = at - now
    full_at[row] = math.min(math.max(at + charge * period / amount, now), last)
  end
  if reserves and missing > longest then
    worst, longest = row, missing
  end
end
if worst > 0 then
  reply[1], reply[2], reply[3] = 1, worst, math.ceil(longest)
  return reply
end
for i = FIRST, #ARGV, 4 do
  local row = (i - FIRST) / 4 + 1
  local key = KEYS[HASHES + row]
  if full_at[row] then
    redis.call('HSET', key, ARGV[i], string.format('%.0f', full_at[row]))
    reply[row + 3] = full_at[row] - now
    local last = now
    for _, at in ipairs(redis.call('HVALS', key)) do
      last = math.max(last, tonumber(at))
    end
    redis.call('PEXPIRE', key, ms(last - now) + 1)
  else
    reply[row + 3] = redis.call('HINCRBY', key, ARGV[i], ARGV[i + 1])
    if reply[row + 3] < 0 then
      redis.call('HSET', key, ARGV[i], 0)
    end
    redis.call('PEXPIRE', key, MONTHS_MS)
  end
end
if not reserves then
  redis.call('SREM', KEYS[1], ARGV[2])
elseif most > 0 then
  redis.call('SADD', KEYS[1], ARGV[2])
  redis.call('PEXPIRE', KEYS[1], ms(ARGV[4]))
end
return reply
"""
