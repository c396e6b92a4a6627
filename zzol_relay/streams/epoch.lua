-- Read a shard's epoch; begin a new one where Redis shows that it lost data.
--
-- KEYS  1 stream  2 shard hash
-- ARGV  1 a fresh epoch  2 highest entry id known to have been acknowledged, or ''  3 retention, ms, or '' to keep
--
-- Replies {epoch, last generated id, verdict}; verdict: same | new (there was none) | behind (the stream is older than
-- an acknowledged entry: an older RDB, or a failover to a replica that had not caught up; the epoch key came with it).
local function parse(id)
  local ms, number = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(number)
end

local last = '0-0'
if redis.call('TYPE', KEYS[1]).ok == 'stream' then
  local info = redis.call('XINFO', 'STREAM', KEYS[1])
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then
      last = info[i + 1]
    end
  end
end

local epoch = redis.call('HGET', KEYS[2], 'epoch')
local verdict = 'same'
if not epoch then
  verdict = 'new'
elseif ARGV[2] ~= '' then
  local ms, number = parse(last)
  local known_ms, known_number = parse(ARGV[2])
  if ms < known_ms or (ms == known_ms and number < known_number) then
    verdict = 'behind'
  end
end
if verdict ~= 'same' then
  epoch = ARGV[1]
  redis.call('HSET', KEYS[2], 'epoch', epoch)
end
if ARGV[3] ~= '' and redis.call('HGET', KEYS[2], 'retention_ms') ~= ARGV[3] then
  redis.call('HSET', KEYS[2], 'retention_ms', ARGV[3])
end
return {epoch, last, verdict}
