//! Whether the settings of two records may select the same hosted zone. Pure.

use std::path::Path;

use super::AwsSettings;

/// Account whose zones settings reach, as far as they tell.
#[derive(PartialEq)]
enum Account<'a> {
    Number(&'a str),
    Role(&'a str),
    AccessKey(&'a str),
    Profile(&'a Path, &'a str),
    /// Of the machine's instance profile.
    Machine,
}

impl<'a> Account<'a> {
    /// Returns the account that a role names (`arn:aws:iam::NUMBER:role/NAME`).
    fn of_role(arn: &'a str) -> Self {
        match arn.split(':').nth(4) {
            Some(number) if !number.is_empty() => Self::Number(number),
            _ => Self::Role(arn),
        }
    }
}

impl AwsSettings {
    /// Returns whether a zone may pass the filters of both. Zones that only might differ count as the same.
    pub(super) fn may_share_zones(&self, other: &Self) -> bool {
        // Each partition of AWS has an endpoint, and zones of its own.
        self.endpoint == other.endpoint
            && self.account() == other.account()
            && self.shares_visibility(other)
            && self.shares_ids(other)
            && self.shares_tags(other)
    }

    fn account(&self) -> Account<'_> {
        // A role decides whose zones are reached, whatever signs the request for it.
        if let Some(role) = &self.role {
            Account::of_role(role)
        } else if let Some(credentials) = &self.credentials {
            // Two keys may be of one account, which only AWS knows; then the engine keeps contested
            // names.
            Account::AccessKey(&credentials.key_id)
        } else if let Some((_, role)) = &self.web_identity {
            Account::of_role(role)
        } else if let Some((file, profile)) = &self.shared_file {
            Account::Profile(file, profile)
        } else {
            Account::Machine
        }
    }

    fn shares_visibility(&self, other: &Self) -> bool {
        match (self.visibility, other.visibility) {
            (Some(one), Some(other)) => one == other,
            // Without the filter, zones of both kinds are reached.
            _ => true,
        }
    }

    /// Filters of ids are suffixes, so one id may pass two of them only if one ends with the other.
    fn shares_ids(&self, other: &Self) -> bool {
        if self.zone_ids.is_empty() || other.zone_ids.is_empty() {
            return true;
        }
        for one in &self.zone_ids {
            for other in &other.zone_ids {
                if one.ends_with(other.as_str()) || other.ends_with(one.as_str()) {
                    return true;
                }
            }
        }
        false
    }

    /// A zone has one value for each tag.
    fn shares_tags(&self, other: &Self) -> bool {
        for (key, value) in &self.tags {
            for (other_key, other_value) in &other.tags {
                // A filter without a value accepts each.
                let differs = value.is_some() && other_value.is_some() && value != other_value;
                if key == other_key && differs {
                    return false;
                }
            }
        }
        true
    }
}
