"""The script in Redis that reserves and settles, so that gateways do not interfere.

Each client has a hash with the time at which each of its budgets is full again, in microseconds of the Redis
server's clock, and a set of its running requests. Both expire when they say nothing any more.

A request's name begins with ``GATEWAY/NUMBER.EPOCH/``, the worker that runs it. Each worker that runs any has
a lease, a key that it renews. When a client has no place left, those are freed whose worker has no lease any
more, or is known to have ended by the one that asks, which is of the same gateway.
"""

from __future__ import annotations

SCRIPT = """
-- KEYS: the client's budgets, its running requests, the worker's lease.
-- ARGV: reserve, settle or renew; request; time of the lease; time for which a request runs at most;
--       requests at a time (0: any number); the gateway; its workers' first epochs that may live, as
--       'NUMBER EPOCH ...'; the begin of the leases' keys; the most periods until a budget is full;
--       then for each budget: name, charge, amount, period. Times are microseconds.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local reserves, most = ARGV[1] == 'reserve', tonumber(ARGV[5])
local FIRST = 10
local function ms(us)
  return math.ceil(tonumber(us) / 1000)
end
if ARGV[1] == 'renew' or (reserves and most > 0) then
  redis.call('SET', KEYS[3], 1, 'PX', ms(ARGV[3]))
end
if ARGV[1] == 'renew' then
  return {0}
end
local function free_places()
  local alive, first = {}, {}
  for number, epoch in string.gmatch(ARGV[7], '(%d+) (%d+)') do
    first[number] = tonumber(epoch)
  end
  for _, name in ipairs(redis.call('SMEMBERS', KEYS[2])) do
    local worker, gateway, number, epoch = string.match(name, '^(([^/]*)/(%d+)%.(%d+))/')
    worker = worker or name
    if alive[worker] == nil then
      local ended = gateway == ARGV[6] and first[number] and tonumber(epoch) < first[number]
      alive[worker] = not ended and redis.call('EXISTS', ARGV[8] .. worker) == 1
    end
    if not alive[worker] then
      redis.call('SREM', KEYS[2], name)
    end
  end
end
if reserves and most > 0 and redis.call('SCARD', KEYS[2]) >= most then
  free_places()
  if redis.call('SCARD', KEYS[2]) >= most then
    return {2}
  end
end
local full_at, reply, worst, longest = {}, {0, 0, 0}, 0, 0
for i = FIRST, #ARGV, 4 do
  local row = (i - FIRST) / 4 + 1
  local charge, amount, period = tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3])
  local last = now + ARGV[9] * period
  local at = math.min(math.max(tonumber(redis.call('HGET', KEYS[1], ARGV[i]) or now), now), last)
  local missing = at - now + math.min(charge, amount) * period / amount - period
  if reserves and missing > longest then
    worst, longest = row, missing
  end
  reply[row + 3] = at - now
  full_at[row] = math.min(math.max(at + charge * period / amount, now), last)
end
if worst > 0 then
  reply[1], reply[2], reply[3] = 1, worst, math.ceil(longest)
  return reply
end
for i = FIRST, #ARGV, 4 do
  local row = (i - FIRST) / 4 + 1
  redis.call('HSET', KEYS[1], ARGV[i], string.format('%.0f', full_at[row]))
  reply[row + 3] = full_at[row] - now
end
local last = now
for _, at in ipairs(redis.call('HVALS', KEYS[1])) do
  last = math.max(last, tonumber(at))
end
redis.call('PEXPIRE', KEYS[1], ms(last - now) + 1)
if not reserves then
  redis.call('SREM', KEYS[2], ARGV[2])
elseif most > 0 then
  redis.call('SADD', KEYS[2], ARGV[2])
  redis.call('PEXPIRE', KEYS[2], ms(ARGV[4]))
end
return reply
"""
