// One token of a row of logits, by the steps of ops/sample.py, without sorting more of the row than they ask for.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

// Tokens of a row, best first and of equal ones the lower first. Weights are whole multiples of 2^-40 of the best's.
class Ranked {
public:
    Ranked(const float* logits, size_t count, float temperature, float min_p) {
        const float best = *std::max_element(logits, logits + count);
        for (size_t i = 0; i < count; i++) {
            const float gap = logits[i] == best ? 0 : logits[i] - best, p = std::exp(gap / temperature);
            const int64_t weight = int64_t(p * 0x1p40f);
            if (weight <= 0) continue;  // a NaN is none either
            left.push_back({logits[i], uint32_t(i), weight});
            total += weight, likely += p >= min_p ? weight : 0;
        }
        std::make_heap(left.begin(), left.end(), worse);
    }

    int64_t total = 0, likely = 0;  // weight of all, and of what min-p keeps

    // Sum of weights up to rank `rank`, with it.
    int64_t sum(size_t rank) {
        while (sums.size() <= rank && !left.empty()) {
            std::pop_heap(left.begin(), left.end(), worse);
            sums.push_back((sums.empty() ? 0 : sums.back()) + left.back().weight), ids.push_back(left.back().id);
            left.pop_back();
        }
        return sums.empty() ? 0 : sums[std::min(rank, sums.size() - 1)];
    }

    // The rank at which the running sum first is above `limit`, at the latest the last.
    size_t passes(int64_t limit) {
        size_t rank = 0;
        while (sum(rank) <= limit && rank + 1 < sums.size() + left.size()) rank++;
        return rank;
    }

    uint32_t id(size_t rank) { return sum(rank) ? ids[rank] : 0; }

private:
    struct Token {
        float logit;
        uint32_t id;
        int64_t weight;
    };

    static bool worse(const Token& a, const Token& b) {
        return a.logit < b.logit || (a.logit == b.logit && a.id > b.id);
    }

    std::vector<Token> left;  // a heap
    std::vector<int64_t> sums;
    std::vector<uint32_t> ids;
};

uint32_t sampled(const float* logits, size_t count, float uniform, float temperature, int32_t top_k, float min_p,
                 float top_p) {
    if (!(temperature > 0 && top_p > 0)) return uint32_t(std::max_element(logits, logits + count) - logits);
    Ranked ranked(logits, count, std::min(std::max(temperature, 1e-30f), 1e30f), min_p);
    const int64_t total = top_k > 0 && size_t(top_k) < count ? ranked.sum(size_t(top_k) - 1) : ranked.total;
    int64_t kept = std::max(std::min(total, ranked.likely), int64_t(1));
    if (top_p < 1) {
        const int64_t enough = std::max(int64_t(float(total) * top_p), int64_t(1));
        kept = std::min(kept, ranked.sum(ranked.passes(enough - 1)));
    }
    return ranked.id(ranked.passes(std::min(int64_t(float(kept) * uniform), kept - 1)));
}

}  // namespace
